"""Start-up, caching and orchestration of the flow, each compared with a baseline.

    python -m benchmarks.flow             make bench-flow; about 6 minutes on 2 cores, with its own servers
    python -m benchmarks.flow --short     each once, one learning rate: 3 minutes     make bench-flow SHORT=1

The quick configuration of tests/support/flow_world.py, on S3, Prefect and MLflow over HTTP. Figures of processes are
medians of three runs, including the start of the process.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workspace import workspace
from tests.support.flow_world import ROOT, World, states, world

EMPTY = "from prefect import flow, task\n@task\ndef f(): pass\n@flow\ndef g():\n    [f() for _ in range(8)]\ng()"
IMPORT, PREFECT = "import flows.finetune", "from prefect import flow, task"


@dataclass(frozen=True)
class Bench:
    place: World
    rounds: int

    def run(self, *arguments: str, **environment: str) -> str:
        return self.place.run(*arguments, code=0, within=3600, **environment)

    def median(self, call: Callable[[], object]) -> float:
        return statistics.median(seconds(call) for _ in range(self.rounds))

    def python(self, code: str) -> float:
        quiet = {"cwd": ROOT, "env": self.place.environment, "check": True, "capture_output": True}
        return self.median(lambda: subprocess.run([sys.executable, "-c", code], **quiet))

    def cached(self) -> None:
        assert {*states(self.run()).values()} == {"Cached"}

    def two_at_once(self) -> None:
        flows = [self.place.start("--until", "convert", FINETUNE_STORE=f"{self.place.folder}/both") for _ in range(2)]
        outputs = [flow.communicate()[0] for flow in flows]
        made = [states(output)["convert"] for output in outputs]
        assert sorted(made) == ["Cached", "Completed"], outputs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flow", description="Time the flow: start-up, caching, orchestration."
    )
    parser.add_argument("--short", action="store_true", help="each once, and no run with another learning rate")
    short = parser.parse_args().short
    with workspace("flow") as folder, world(folder) as place:
        measure(Bench(place, 1 if short else 3), short)


def measure(bench: Bench, short: bool) -> None:
    place = bench.place
    print(f"{'':28}  seconds  {'compared with':28}  seconds  ratio")
    show("import flows.finetune", bench.python(IMPORT), "import prefect", bench.python(PREFECT))
    first = seconds(bench.run)
    again = bench.median(bench.cached)
    show("all cached, standing server", again, "the same, everything made", first)
    show("all cached, standing server", again, "an empty flow of 8 tasks", bench.python(EMPTY))
    show("dry run", bench.median(lambda: bench.run("--dry-run")), "all cached", again)
    alone = seconds(lambda: bench.run("--until", "convert", FINETUNE_STORE=f"{place.folder}/alone"))
    show("two flows, one empty store", seconds(bench.two_at_once), "one flow, one empty store", alone)
    if not short:
        rate = seconds(lambda: bench.run("optimizer.lr=1e-3"))
        show("learning rate changed", rate, "everything made", first)


def show(name: str, mine: float, beside: str, theirs: float) -> None:
    print(f"{name:28}  {mine:7.2f}  {beside:28}  {theirs:7.2f}  {mine / theirs:5.2f}", flush=True)


def seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
