"""Timing of calls that run alternately, with the median of each."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Spent:
    seconds: float
    cpu: float  # seconds of this process and of children that have ended


def medians(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Spent]:
    """Return the medians over the rounds. In each round every call runs once."""
    found: dict[str, list[Spent]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_timed(call))
    return {
        name: Spent(statistics.median(one.seconds for one in all), statistics.median(one.cpu for one in all))
        for name, all in found.items()
    }


def _timed(call: Callable[[], object]) -> Spent:
    wall, before = time.perf_counter(), os.times()
    call()
    after = os.times()
    return Spent(time.perf_counter() - wall, sum(after[:4]) - sum(before[:4]))


def python(code: str, *arguments: object) -> str:
    """Return the output of a separate process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.strip()


def show(spent: dict[str, Spent], unit: float = 1.0, name_of_unit: str = "s") -> None:
    """Print a line for each call, with its ratio to the first."""
    first = next(iter(spent.values()))
    for name, one in spent.items():
        ratio = f"{one.seconds / first.seconds:7.2f} x, CPU {one.cpu / max(first.cpu, 1e-9):7.2f} x"
        print(f"  {name:44} {one.seconds * unit:9.2f} {name_of_unit}, CPU {one.cpu * unit:9.2f}  {ratio}", flush=True)
