"""Trials of a run's fastest plans, one after another on this host, the fastest measured one named at the end.

    candidates(asked, run, facts, gpu, best)                 the plans, the configuration's own layout first if legal
    measured(candidate, conf, given, more) -> Row            one trial, in a process of its own
    line(row), verdict(rows, conf, given)                    what was measured, and the keys of the fastest

A plan's time is off by what hosts differ by: the same MoE step took 2.4 to 3.4 s on three hosts of the same GPU. So the
plan proposes, and trials choose.

Not covered: several hosts. Trials of a cut model rank layouts of the whole one only where each stage is left as large a
share of its layers as before.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from conf.model_facts import ModelFacts
from conf.planner.display import degrees
from conf.planner.hardware import Gpu
from conf.planner.search import changes, search
from conf.planner.timing import timing
from conf.rules.layout import problems
from conf.schema.run import Run
from contract.faults import Fault
from contract.processes import end_with_parent


@dataclass(frozen=True)
class Candidate:
    """A layout that is legal and fits by the plan."""

    name: str
    overrides: str  # of the configuration; none for its own layout
    planned: float  # seconds of a step of the whole model


@dataclass(frozen=True)
class Row:
    """The figures of a trial, or the reason why there are none."""

    candidate: Candidate
    seconds: float | None = None  # of a step of what was measured
    planned: float | None = None  # of the same
    allocated: float | None = None  # bytes on the fullest rank
    failed: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"candidate": vars(self.candidate)}


def candidates(asked: Run, run: Run, facts: ModelFacts, gpu: Gpu, best: int) -> list[Candidate]:
    """The configuration's own layout, where it is legal, and the `best` fastest others of as many GPUs.

    `run` is what was asked for with the layout that it gets, which differ where layout.auto chooses it.
    """
    if run.layout.nodes > 1:
        raise Fault(
            f"--best: {run.layout.nodes} hosts, and trials take one; say layout.nodes=1 and what of the layout is to "
            "change with it"
        )
    offered = search(run, facts, gpu, run.world).offered
    if not offered:
        raise Fault(f"--best: no layout of {run.world} {gpu.name} is legal and fits; python -m flows.plan says why")
    own = []
    if not problems(run, facts, suggest=False):
        own = [Candidate(f"as configured: {_name(run)}", "", timing(run, facts, gpu).likely)]
    others = [(one, made) for one in offered if changes(run, made := one.applied(run))]
    return own + [Candidate(_name(made), changes(asked, made), one.seconds) for one, made in others[:best]]


def _name(run: Run) -> str:
    return f"{degrees(run.layout)}; micro batch {run.train.micro_batch}, recompute {run.train.recompute}"


def merged(given: list[str], overrides: str) -> list[str]:
    """The keys that were given, but for those that the candidate sets, and the candidate's."""
    own = overrides.split()
    names = {key.partition("=")[0] for key in own}
    return [*(key for key in given if key.partition("=")[0] not in names), *own]


def measured(candidate: Candidate, conf: str, given: list[str], more: list[str]) -> Row:
    """Take a trial of the configuration with the keys that were given and the candidate's. `more` are its options."""
    command = [sys.executable, "-m", "trainer.trial", conf, *merged(given, candidate.overrides), *more, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=_with_parent)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return Row(candidate, failed=next((line for line in said if line.startswith("error:")), said[-1])[:200])
    if answer["out_of_memory"]:
        return Row(candidate, failed="out of memory")
    slowest = max(answer["ranks"], key=lambda rank: rank["measured"]["seconds"])
    allocated = max((rank["measured"].get("allocated", 0) for rank in answer["ranks"]), default=0)
    return Row(candidate, slowest["measured"]["seconds"], slowest["planned"].get("seconds"), allocated or None)


def _with_parent() -> None:
    end_with_parent()


def line(row: Row) -> str:
    """One row as people read it."""
    if row.seconds is None:
        return f"{row.candidate.name}: {row.failed}"
    planned = "" if row.planned is None else f" / {row.planned * 1e3:,.0f} = {row.seconds / row.planned:.2f}"
    memory = "" if row.allocated is None else f", {row.allocated / 1e9:.1f} GB"
    return f"{row.candidate.name}: {row.seconds * 1e3:,.0f}{planned} ms{memory}"


def verdict(rows: list[Row], conf: str, given: list[str]) -> str:
    """The fastest, beside the configuration's own layout, and the command that takes it."""
    ended = [row for row in rows if row.seconds is not None]
    if not ended:
        return "no trial ended well"
    best = min(ended, key=lambda row: row.seconds or 0)
    if not best.candidate.overrides:
        return f"the fastest is {conf} as it is"
    own = next((row.seconds for row in ended if not row.candidate.overrides), None)
    times = f", {own / best.seconds:.2f} times as fast as {conf} as it is" if own and best.seconds else ""
    keys = " ".join([conf, *merged(given, best.candidate.overrides)])
    return f"the fastest is {best.candidate.name}{times}:\n    python -m flows.finetune {keys}"
