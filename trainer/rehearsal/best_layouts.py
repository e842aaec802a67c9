"""Trials of a run's fastest plans, one after another on this host; the fastest measured one is named at the end.

    candidates(configured, run, facts, gpu, best)            the plans, the configuration's own layout first if legal
    measured(candidate, conf, given, more) -> Row            one trial, in a separate process
    line(row), verdict(rows, conf, given)                    the measurements, and the keys of the fastest plan

A planned time cannot be exact, because hosts differ: the same MoE step took 2.4 to 3.4 s on three hosts with the same
GPU. Therefore the plan proposes layouts, and trials choose among them.

Not covered: several hosts. Trials of a cut model rank layouts of the whole model only if each stage keeps its share of
layers.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

from conf.load import replaced
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
    """A layout that is legal and fits according to the plan."""

    name: str
    overrides: str  # of the configuration; none for its own layout
    planned: float  # seconds of a step of the whole model


@dataclass(frozen=True)
class Row:
    """The measurements of a trial, or the reason why it failed."""

    candidate: Candidate
    seconds: float | None = None  # of a step of the measured model
    planned: float | None = None  # of the same model
    allocated: float | None = None  # bytes on the fullest rank
    failed: str = ""


def candidates(configured: Run, run: Run, facts: ModelFacts, gpu: Gpu, best: int) -> list[Candidate]:
    """Return the configuration's own layout, if legal, and the `best` fastest others with as many GPUs.

    `run` is `configured` with its final layout, which differs if layout.auto chooses it.
    """
    if run.layout.nodes > 1:
        raise Fault(
            f"--best: {run.layout.nodes} hosts, but trials use one; set layout.nodes=1 and the layout keys that "
            "depend on it"
        )
    offered = search(run, facts, gpu, run.world).offered
    if not offered:
        raise Fault(f"--best: no layout of {run.world} {gpu.name} is legal and fits; python -m flows.plan shows why")
    configured_layout = []
    if not problems(run, facts, suggest=False):
        configured_layout = [Candidate(f"as configured: {_name(run)}", "", timing(run, facts, gpu).likely)]
    others = [(offer, changed) for offer in offered if changes(run, changed := offer.applied(run))]
    return configured_layout + [
        Candidate(_name(changed), changes(configured, changed), offer.seconds) for offer, changed in others[:best]
    ]


def _name(run: Run) -> str:
    return f"{degrees(run.layout)}; micro batch {run.train.micro_batch}, recompute {run.train.recompute}"


def measured(candidate: Candidate, conf: str, given: list[str], more: list[str]) -> Row:
    """Run a trial of the configuration with the given keys and the candidate's. `more` are further options."""
    command = [
        sys.executable,
        "-m",
        "trainer.trial",
        conf,
        *replaced(given, candidate.overrides.split()),
        *more,
        "--json",
    ]
    process = subprocess.run(command, capture_output=True, text=True, preexec_fn=end_with_parent)
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        errors = [line for line in process.stderr.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        return Row(candidate, failed=next((line for line in errors if line.startswith("error:")), errors[-1])[:200])
    if answer["out_of_memory"]:
        return Row(candidate, failed="out of memory")
    slowest = max(answer["ranks"], key=lambda rank: rank["measured"]["seconds"])
    allocated = max((rank["measured"].get("allocated", 0) for rank in answer["ranks"]), default=0)
    return Row(candidate, slowest["measured"]["seconds"], slowest["planned"].get("seconds"), allocated or None)


def line(row: Row) -> str:
    """Return one row as text."""
    if row.seconds is None:
        return f"{row.candidate.name}: {row.failed}"
    planned = "" if row.planned is None else f" / {row.planned * 1e3:,.0f} = {row.seconds / row.planned:.2f}"
    memory = "" if row.allocated is None else f", {row.allocated / 1e9:.1f} GB"
    return f"{row.candidate.name}: {row.seconds * 1e3:,.0f}{planned} ms{memory}"


def verdict(rows: list[Row], conf: str, given: list[str]) -> str:
    """Return the fastest layout, compared with the configuration's own, and the command that uses it."""
    succeeded = [row for row in rows if row.seconds is not None]
    if not succeeded:
        return "no trial succeeded"
    best = min(succeeded, key=lambda row: row.seconds or 0)
    if not best.candidate.overrides:
        return f"the fastest is {conf} unchanged"
    configured_seconds = next((row.seconds for row in succeeded if not row.candidate.overrides), None)
    times = ""
    if configured_seconds and best.seconds:
        times = f", {configured_seconds / best.seconds:.2f} times as fast as {conf} unchanged"
    keys = " ".join([conf, *replaced(given, best.candidate.overrides.split())])
    return f"the fastest is {best.candidate.name}{times}:\n    python -m flows.finetune {keys}"
