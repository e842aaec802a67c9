"""Table of the configurations that can run: their hardware, time and price, beside the fastest layout that was found.

    python -m conf.presets              the table in Markdown, by the planner's arithmetic alone
    python -m conf.presets README.md    write it into that page, between its two marks; make presets does it

A configuration is written at the fastest layout that leaves room for the plan's own error (conf/planner/search.py), or
says in a comment of its file why it is not:

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
from contract.files import write_atomically

BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
EXCUSE = re.compile(r"^# Not the fastest layout: (.+)", re.MULTILINE)
HEADS = ("configuration", "trained", "GPUs", "s/step", "GB left", "training", "whole flow", "USD", "fastest found")


@dataclass(frozen=True)
class Preset:
    name: str
    planned: Plan
    excuse: str  # why it is not the fastest; empty where nothing is said

    @property
    def ratio(self) -> float:
        """Seconds of a step over those of the fastest layout that was found; 1 where none is notably faster."""
        assert self.planned.time
        return self.planned.time.likely / self.planned.faster.seconds if self.planned.faster else 1.0


def presets() -> Iterator[Preset]:
    """All configurations in conf/ for GPUs, the smallest hardware first."""
    found = []
    for file in FOLDER.glob("*.yaml"):
        run = load(file, illegal=True)
        gpu, facts = hardware.of(run), facts_of(run)
        if gpu.cuda:
            said = EXCUSE.search(file.read_text("utf-8"))
            planned = compared(plan(settle(run, facts, gpu), facts, gpu))
            found.append(Preset(file.stem, planned, said[1] if said else ""))
    yield from sorted(found, key=lambda one: (one.planned.run.world * one.planned.gpu.memory, one.name))


def table(found: Iterable[Preset]) -> str:
    rows = [HEADS, *map(_row, found)]
    rows.insert(1, tuple("---" for _ in HEADS))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Preset) -> tuple[str, ...]:
    planned, run, gpu = one.planned, one.planned.run, one.planned.gpu
    assert planned.time and planned.time.hours is not None, f"{one.name}: train.steps says how long it is"
    layout, needs = run.layout, planned.needs
    trained = "all weights" if run.adapter.kind == "none" else f"{run.adapter.kind} {run.adapter.rank}"
    hosts = f"{layout.nodes} x {layout.gpus_per_node}" if layout.nodes > 1 else str(layout.gpus_per_node)
    cost = sum(need.cost or 0.0 for need in needs)
    best = f"{planned.faster.seconds:.3g} s, {one.ratio:.2f} times" if planned.faster else "this one"
    return (
        f"`{one.name}`",
        trained,
        f"{hosts} {gpu.name}",
        f"{planned.time.likely:.3g}",
        f"{-planned.fullest.over / GB:.0f}",
        f"{planned.steps} steps, {duration(planned.time.hours * 3600)}",
        duration(sum(need.seconds or 0.0 for need in needs)),
        f"{cost:,.2f}" if cost < 10 else f"{cost:,.0f}",
        best,
    )


def write(page: Path, make: Callable[[], str]) -> None:
    """Write a table between the marks of a page. The page is read first, as planning takes a minute."""
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
    parser = argparse.ArgumentParser(prog="python -m conf.presets", description="Print the table of configurations.")
    parser.add_argument("page", nargs="?", type=Path, help="write it into this page instead, between its marks")
    page = parser.parse_args(argv).page
    if page:
        write(page, lambda: table(presets()))
    else:
        print(table(presets()))


if __name__ == "__main__":
    with closed_pipe.quiet():
        main()
