"""Tables of the configurations for GPUs, grouped by hardware: layout, time, price and the fastest layout known.

    python -m benchmarks.presets          print the tables in Markdown; the planner computes all figures
    python -m benchmarks.presets PAGE     write them into that page, between its two marks; make presets does this

A configuration uses the fastest layout that leaves room for the error of the plan (conf/planner/search.py). A slower
one gives the reason in a comment of its file:

    # Not the fastest layout: ...
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.load import FOLDER, load
from conf.planner import hardware
from conf.planner.display import duration
from conf.planner.hardware import GB
from conf.planner.verdict import Plan, compared, facts_of, plan, settle
from contract import closed_pipe
from contract.amounts import dollars
from contract.files import write_atomically

BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
EXCUSE = re.compile(r"^# Not the fastest layout: (.+)", re.MULTILINE)
HEADS = ("configuration", "trained", "GPUs", "s/step", "GB left", "training", "whole flow", "USD", "fastest layout")
GROUPS = ("One card of 24 or 48 GB", "One H100 or H200", "One host", "Several hosts")


@dataclass(frozen=True)
class Preset:
    name: str
    planned: Plan
    excuse: str  # why it is not the fastest; empty if the file gives no reason

    @property
    def ratio(self) -> float:
        """Seconds of a step, divided by those of the fastest layout; 1 if no layout is notably faster."""
        assert self.planned.time
        return self.planned.time.likely / self.planned.faster.seconds if self.planned.faster else 1.0

    @property
    def group(self) -> str:
        layout = self.planned.run.layout
        if layout.world > 1:
            return GROUPS[3] if layout.nodes > 1 else GROUPS[2]
        return GROUPS[0] if self.planned.gpu.memory < 60 * GB else GROUPS[1]


def presets() -> Iterator[Preset]:
    """All configurations in conf/ for GPUs, the smallest hardware first."""
    listed = []
    for file in FOLDER.glob("*.yaml"):
        run = load(file, illegal=True)
        gpu, facts = hardware.of(run), facts_of(run)
        if gpu.cuda:
            excuse = EXCUSE.search(file.read_text("utf-8"))
            planned = compared(plan(settle(run, facts, gpu), facts, gpu))
            listed.append(Preset(file.stem, planned, excuse[1] if excuse else ""))
    yield from sorted(listed, key=lambda preset: (preset.planned.run.world * preset.planned.gpu.memory, preset.name))


def tables(found: Iterable[Preset]) -> str:
    """Return one table for each group of hardware, under its heading."""
    presets, parts = list(found), []
    for group in GROUPS:
        rows = [HEADS, tuple("---" for _ in HEADS), *(_row(preset) for preset in presets if preset.group == group)]
        parts.append("\n".join((f"## {group}\n", *(f"| {' | '.join(row)} |" for row in rows))))
    return "\n\n".join(parts)


def _row(preset: Preset) -> tuple[str, ...]:
    planned, run, gpu = preset.planned, preset.planned.run, preset.planned.gpu
    assert planned.time and planned.time.hours is not None, f"{preset.name}: has no train.steps"
    layout, needs = run.layout, planned.needs
    trained = "all weights" if run.adapter.kind == "none" else f"{run.adapter.kind} {run.adapter.rank}"
    hosts = f"{layout.nodes} x {layout.gpus_per_node}" if layout.nodes > 1 else str(layout.gpus_per_node)
    cost = sum(need.cost or 0.0 for need in needs)
    best = f"{planned.faster.seconds:.3g} s, {preset.ratio:.2f} times" if planned.faster else "this"
    return (
        f"`{preset.name}`",
        trained,
        f"{hosts} {gpu.name}",
        f"{planned.time.likely:.3g}",
        f"{-planned.fullest.over / GB:.0f}",
        f"{planned.steps} steps, {duration(planned.time.hours * 3600)}",
        duration(sum(need.seconds or 0.0 for need in needs)),
        dollars(cost),
        best,
    )


def write(page: Path, make: Callable[[], str]) -> None:
    """Write the tables between the marks of a page. Read the page first, because planning takes a minute."""
    try:
        before, _, rest = page.read_text("utf-8").partition(BEGIN)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SystemExit(f"error: {page}: {reason}; name a page with {BEGIN} ... {END}") from None
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"error: {page}: has no {BEGIN} ... {END}")
    write_atomically(page, f"{before}{BEGIN}\n{make()}\n{END}{after}", durable=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description="Print tables of configurations.")
    parser.add_argument("page", nargs="?", type=Path, help="write them into this page, between its marks")
    page = parser.parse_args(argv).page
    if page:
        write(page, lambda: tables(presets()))
    else:
        print(tables(presets()))


if __name__ == "__main__":
    closed_pipe.run(main)
