"""Start-up, caching and orchestration of the flow, each beside what it is compared with.

    python -m benchmarks.flow          make bench-flow; about 6 minutes on 2 cores, on servers of its own

The quick configuration of tests/support/flow_world.py, on S3, Prefect and MLflow over HTTP. Figures of processes are
medians of ROUNDS runs, start of the process included.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.flow_world import ROOT, World, states, world

ROUNDS = 3
EMPTY = "from prefect import flow, task\n@task\ndef f(): pass\n@flow\ndef g():\n    [f() for _ in range(8)]\ng()"


def main() -> None:
    rows: list[tuple[str, float, str, float]] = []
    with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as place:
        rows.append(
            (
                "import flows.finetune",
                python(place, "import flows.finetune"),
                "import prefect",
                python(place, "from prefect import flow, task"),
            )
        )
        first = seconds(lambda: place.run())
        again = statistics.median(seconds(lambda: cached(place)) for _ in range(ROUNDS))
        rows.append(("all cached, standing server", again, "the same, everything made", first))
        rows.append(("all cached, standing server", again, "an empty flow of 8 tasks", python(place, EMPTY)))
        rate = seconds(lambda: place.run("optimizer.lr=1e-3"))
        rows.append(("learning rate changed", rate, "everything made", first))
        dry = statistics.median(seconds(lambda: place.run("--dry-run")) for _ in range(ROUNDS))
        rows.append(("dry run", dry, "all cached", again))
        both = seconds(lambda: two_at_once(place))
        alone = seconds(lambda: place.run("--until", "convert", FINETUNE_STORE=f"{folder}/alone"))
        rows.append(("two flows, one empty store", both, "one flow, one empty store", alone))
    width = max(len(row[0]) for row in rows)
    other = max(len(row[2]) for row in rows)
    print(f"{''.ljust(width)}  seconds  {'compared with'.ljust(other)}  seconds  ratio")
    for name, mine, beside, theirs in rows:
        print(f"{name.ljust(width)}  {mine:7.2f}  {beside.ljust(other)}  {theirs:7.2f}  {mine / theirs:5.2f}")


def python(place: World, code: str) -> float:
    command = [sys.executable, "-c", code]
    quiet = {"cwd": ROOT, "env": place.environment, "check": True, "capture_output": True}
    return statistics.median(seconds(lambda: subprocess.run(command, **quiet)) for _ in range(ROUNDS))


def cached(place: World) -> None:
    assert {*states(place.run()).values()} == {"Cached"}


def two_at_once(place: World) -> None:
    flows = [place.start("--until", "convert", FINETUNE_STORE=f"{place.folder}/both") for _ in range(2)]
    outputs = [flow.communicate()[0] for flow in flows]
    made = [states(output)["convert"] for output in outputs]
    assert sorted(made) == ["Cached", "Completed"], outputs


def seconds(call) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
