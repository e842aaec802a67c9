"""Faults at random moments of real gang runs, and a table of how the gangs recover.

    python -m benchmarks.gang_faults [N] [--only NAME ...] [--seed N] [--keep FOLDER]      N times each; make faults N=1
    python -m benchmarks.gang_faults --short      FEW of them, once each: 4 minutes      make faults SHORT=1
    python -m benchmarks.gang_faults --apart      a disk for each host: only the store is shared     make faults APART=1
    python -m benchmarks.gang_faults --minutes 60 [--every 5]      one training for an hour      make faults MINUTES=60

Each gang uses three of four hosts (tests/tasks/gang/world.py) and trains a tiny GLM-4-MoE with a checkpoint every 10
steps. A run suffers the same fault (tests/tasks/gang/harm.py) repeatedly, each time after a later checkpoint, and must
still end. The table has the seconds until the fault is noticed (the board says stop), until no process of the attempt
is left on any host, and until the next step; the number of repeated steps; and the processes that were left. The run
passes if each time is below 30 s, at most one checkpoint interval is lost (with --apart, no step before the newest
checkpoint in the store), no process is left, and the run ends with every step once and the losses of an undisturbed
run. Otherwise the exit code is 1. Each fault takes about a minute on 2 cores.

With --minutes, one training with a spare host suffers all kinds of faults in random order at fixed intervals, the
first after half an interval, and is cancelled after that time. The table has a line for each fault, then the product's
seconds by category since the first step (tasks/gang/history/spent.py). At least GOOD of them must be effective, and
their sum must be the time by this benchmark's clock. At most one attempt may begin after each fault. Every step must be
there once. A repeated step must have the same loss again, and the steps of the first two intervals must have those of
an undisturbed run.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks import effective_time
from benchmarks.workspace import workspace
from tasks.gang.board import Board, newest_attempt
from tasks.gang.copies import Copies
from tasks.store import Store, open_store
from tests.support.flow_world import wait_for
from tests.tasks.gang.conftest import same
from tests.tasks.gang.harm import FAULTS, Fault, mended
from tests.tasks.gang.world import NEWEST, World, missing, world

HOSTS, NODES = 4, 3
INTERVAL = 10  # steps between checkpoints
LONGER = 25  # with --minutes
FIRST, LAST = INTERVAL + 1, 2 * INTERVAL + 4  # range of steps after a resume in which a fault occurs
TAIL = 15  # steps of a run after the last fault
SCHEDULE = 20000  # train.steps of all runs, which train.stop_after ends, so their losses are comparable
SOON = 30.0  # seconds
RUN_WITHIN = 900.0
GOOD = 0.9  # least share of effective time
BEGAN_AGAIN = "began again, which it need not have"
FEW = ("rank SIGKILL", "host removed")  # a defect of one process, and a lost machine

Start = Callable[[], subprocess.Popen]  # starts the flow


@dataclass
class Case:
    """One occurrence of a fault."""

    at: int = 0  # step
    interval: int = INTERVAL
    saved: int | None = None  # newest checkpoint in the store, if hosts have a disk each
    noticed: float | None = None
    clean: float | None = None
    resumed: float | None = None
    lost: int = 0
    orphans: int = 0
    says: str = ""

    def wrong(self) -> Iterator[str]:
        for what in ("noticed", "clean"):
            if (seconds := getattr(self, what)) and seconds > SOON:
                yield f"{what} after {seconds:.0f} s"
        if self.lost > (self.interval if self.saved is None else self.at - self.saved):
            yield f"{self.lost} steps lost"
        if self.orphans:
            yield f"{self.orphans} processes left"

    def __str__(self) -> str:
        seconds = {"noticed": self.noticed, "clean": self.clean, "next step": self.resumed}
        told = [f"{what} after {value:.1f} s" for what, value in seconds.items() if value is not None]
        return ", ".join([f"after step {self.at}", *told, f"{self.lost} steps lost", self.says]).removesuffix(", ")


@dataclass
class Row:
    """Row of the table: a fault with all its occurrences."""

    fault: str
    cases: list[Case] = field(default_factory=list)
    runs: int = 0
    attempts: int = 0
    difference: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [self.fault, f"{len(self.cases)} in {self.runs}", "; ".join(self.wrong) or "yes"]
        for what in ("noticed", "clean", "resumed"):
            seconds = [value for case in self.cases if (value := getattr(case, what)) is not None]
            cells.append(f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "")
        lost = max((case.lost for case in self.cases), default=0)
        orphans = sum(case.orphans for case in self.cases)
        return "| " + " | ".join(map(str, (*cells, lost, self.attempts, orphans, f"{self.difference:.0e}"))) + " |"


HEAD = (
    "| fault | times, in runs | ends right | noticed: median, longest | clean | next step | steps lost, most "
    "| attempts | processes left | difference of losses |\n" + "|---" * 10 + "|"
)
HEAD_OF_TIMED = "| minute | fault | right | noticed | clean | next step | steps lost |\n" + "|---" * 7 + "|"


def main() -> int:
    options = _arguments()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also ends all started processes
    faults = {name: FAULTS[name] for name in options.only or FAULTS if options.apart or not FAULTS[name].apart}
    rows: list[Row] = []
    with workspace("faults") as folder, world(folder, HOSTS, options.apart) as made:
        os.environ.update(made.environment)
        if options.minutes:
            return _timed_run(made, faults, options)
        expected = _undisturbed(made, max(_steps(fault, options.times) for fault in faults.values()))
        for name, fault in faults.items():
            rows.append(Row(name))
            while len(rows[-1].cases) < options.times and not rows[-1].wrong:
                _one_run(made, fault, rows[-1], options.times - len(rows[-1].cases), expected)
            _keep_log(made, rows[-1], options)
    print("", HEAD, *rows, sep="\n", flush=True)
    return 1 if any(row.wrong for row in rows) else 0


def _keep_log(made: World, row: Row, options: argparse.Namespace) -> None:
    if row.wrong:
        keep = Path(options.keep or tempfile.gettempdir()) / f"fault-{row.fault.replace(' ', '-')}.log"
        shutil.copy(made.folder / "flow.log", keep)
        print(f"{row.fault}: {'; '.join(row.wrong)}; its log: {keep}", flush=True)


def _steps(fault: Fault, times: int) -> int:
    return LAST + TAIL + fault.steps * times


def _undisturbed(made: World, steps: int) -> dict[int, float]:
    began = time.monotonic()
    (made.folder / "flow.log").unlink(missing_ok=True)
    flow = _start(made, steps)
    gang = _gang(made, flow)
    assert flow.wait(RUN_WITHIN) == 0, (made.folder / "flow.log").read_text()
    print(f"undisturbed: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    return _losses(_published(gang))


def _one_run(made: World, fault: Fault, row: Row, times: int, expected: dict[int, float]) -> None:
    steps = _steps(fault, times)
    row.runs += 1
    start = partial(_start, made, steps)
    with _flow(made, start, row):
        gang = _gang(made, made.running)
        first, base = newest_attempt(_store(), gang), 0
        for _ in range(times):
            moment = base + random.randint(FIRST, LAST)
            wait_for(lambda at=moment: made.step() >= at or made.running.poll() is not None, RUN_WITHIN)
            if made.running.poll() is not None or not made.training():
                break  # the run ended before all faults: another run gets the remaining ones
            time.sleep(random.uniform(0, 0.5))
            case = _case(made, fault, gang, start)
            row.cases.append(case)
            row.wrong += case.wrong()
            print(f"{row.fault} {len(row.cases)}: {case}", flush=True)
            mended()
            base = made.step() // INTERVAL * INTERVAL
        if made.running.wait(RUN_WITHIN):
            row.wrong.append("ends with an error")
        attempts = newest_attempt(_store(), gang) - first + 1
        row.attempts += attempts
        if fault.goes_on and attempts > 1:
            row.wrong.append(BEGAN_AGAIN)
        _compare(row, _losses(_published(gang)), {step: expected[step] for step in range(1, steps + 1)})


@contextlib.contextmanager
def _flow(made: World, start: Start, row: Row) -> Iterator[None]:
    """Start the flow for a new training. After the block, nothing of it may run. Errors are added to the row."""
    (made.folder / "flow.log").unlink(missing_ok=True)
    for failed in [*made.folder.glob("runs/work/train-*"), *made.folder.glob("disk*/runs/work/train-*")]:
        shutil.rmtree(failed)
    for gang in {name.partition("/")[0] for name in _store().keys("gangs") if name.startswith("train-")}:
        Copies(_store(), gang).forget()
    made.running = start()
    try:
        yield
    except (TimeoutError, subprocess.TimeoutExpired, AssertionError, LookupError, psutil.Error) as error:
        row.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        made.running.kill()
        made.running.wait()
        mended()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not made.training(), 15)
    if left := made.training():
        row.wrong.append(f"{len(left)} processes left after the end")


def _timed_run(made: World, faults: dict[str, Fault], options: argparse.Namespace) -> int:
    row, share = Row("random faults"), ""
    seen: dict[int, float] = {}  # the first loss of each step, before any repetition
    found: dict[int, float] = {}
    start = partial(_start, made, SCHEDULE, LONGER, HOSTS - NODES)
    print(HEAD_OF_TIMED, flush=True)
    with _flow(made, start, row):
        gang = _gang(made, made.running)
        wait_for(lambda: made.step() > 0, RUN_WITHIN)
        began, before = time.time(), _seconds(gang)
        names: list[str] = []
        attempts: list[tuple[str, int]] = []  # each fault, and the newest attempt before it
        for number in range(int(options.minutes / options.every)):
            names = names or random.sample([*faults], len(faults))
            time.sleep(max(0.0, began + (number + 0.5) * 60 * options.every - time.time()))
            seen = _losses(made.lines()) | seen
            attempts.append((names[-1], newest_attempt(_store(), gang)))
            _timed_case(made, names[-1], faults[names.pop()], gang, start, row, (time.time() - began) / 60)
        time.sleep(max(0.0, began + 60 * options.minutes - time.time()))
        after, wall = _seconds(gang), time.time() - began
        row.wrong += _starts([*attempts, ("", newest_attempt(_store(), gang))])
        share, wrong = effective_time.since(before, after, wall, GOOD)
        row.wrong += wrong
        made.running.terminate()
        made.running.wait(SOON)
        found = _losses(made.lines())
    print(f"\n{len(found)} steps. {share}", flush=True)
    _keep_log(made, row, options)
    if found:
        if sorted(found) != [*range(1, len(found) + 1)]:
            row.wrong.append(f"{len(found)} steps up to step {max(found)}")
        known = seen | _undisturbed(made, row.cases[:2][-1].at)
        expected = {step: known[step] for step in found if step in known}  # the end may precede a repetition
        _compare(row, {step: found[step] for step in expected}, expected)
        print(f"{len(expected)} losses compared: relative difference at most {row.difference:.0e}", flush=True)
    print("; ".join(row.wrong) or "passed", flush=True)
    return 1 if row.wrong else 0


def _timed_case(made: World, name: str, fault: Fault, gang: str, start: Start, row: Row, minute: float) -> None:
    attempt = newest_attempt(_store(), gang)
    case = _case(made, fault, gang, start, LONGER)
    mended()
    wrong = [*case.wrong()]
    if fault.goes_on and newest_attempt(_store(), gang) > attempt:
        wrong.append(BEGAN_AGAIN)
    row.cases.append(case)
    row.wrong += [f"{name}: {what}" for what in wrong]
    seconds = [f"{value:.1f}" if value else "" for value in (case.noticed, case.clean, case.resumed)]
    cells = (f"{minute:.1f}", name, "; ".join(wrong) or "yes", *seconds, case.lost)
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _starts(attempts: list[tuple[str, int]]) -> Iterator[str]:
    """Yield the faults after which more than one attempt began: the new one failed too."""
    for (name, before), (_, after) in itertools.pairwise(attempts):
        if after - before > 1:
            yield f"{name}: {after - before} attempts after it"


def _seconds(gang: str) -> dict[str, float]:
    return effective_time.seconds(Path(os.environ["FINETUNE_RUNS"]) / "work" / gang, NODES)


def _case(made: World, fault: Fault, gang: str, start: Start, interval: int = INTERVAL) -> Case:
    case, attempt, before = Case(interval=interval), newest_attempt(_store(), gang), made.attempt()
    case.saved = Copies(_store(), gang).newest() if made.apart else None
    fault.do(made)
    began, wall = time.monotonic(), time.time()
    case.at = made.step()
    if fault.goes_on:
        return case
    watcher = threading.Thread(target=_notice, args=(Board(_store(), gang, attempt), case, began), daemon=True)
    watcher.start()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: all(map(_gone, before)), 2 * SOON)
    case.clean, case.orphans = time.monotonic() - began, sum(not _gone(process) for process in before)
    if fault.again:
        made.running.wait(2 * SOON)
        made.running = start()
    wait_for(lambda: _goes_on(made, case, wall) or made.running.poll() is not None, 300)
    watcher.join(2 * SOON)
    return case


def _gone(process: psutil.Process) -> bool:
    """Whether it has ended, even if no parent has asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _notice(board: Board, case: Case, began: float) -> None:
    while case.noticed is None and time.monotonic() - began < 3 * SOON:
        with contextlib.suppress(Exception):
            word = board.read("gang.json") or {}
            stopped = any((board.read(f"nodes/{k}.json") or {}).get("reason") for k in range(NODES))
            if word.get("state") == "stop" or stopped:
                case.noticed, case.says = time.monotonic() - began, word.get("reason", "")
        time.sleep(0.2)


def _goes_on(made: World, case: Case, wall: float) -> bool:
    lines = made.lines(NEWEST)
    starts = [line for line in lines if line["kind"] == "start" and line["time"] > wall]
    steps = [line for line in lines if starts and line["kind"] == "train" and line["time"] > starts[-1]["time"]]
    if not steps:
        return False
    case.resumed = steps[0]["time"] - wall
    case.lost = max(0, case.at - starts[-1]["step"])
    return True


def _compare(row: Row, found: dict[int, float], expected: dict[int, float]) -> None:
    if found.keys() != expected.keys():
        row.wrong.append(f"{len(found)} steps of {len(expected)}")
        return
    row.difference = max([row.difference, *(abs(found[s] - expected[s]) / expected[s] for s in expected)])
    if not same(found, expected):
        row.wrong.append("other losses")


def _start(made: World, steps: int, interval: int = INTERVAL, spares: int = 0) -> subprocess.Popen:
    fixed = [
        f"layout.nodes={NODES}",
        f"train.steps={SCHEDULE}",
        f"checkpoint.save_every={interval}",
        "checkpoint.keep=5",
        f"gang.spares={spares}",
        "evaluate.tasks=[]",
    ]
    return made.flow("--from", "train", "--until", "train", *fixed, f"train.stop_after={steps}")


def _gang(made: World, flow) -> str:
    """Return the folder in which the current run works."""
    log, found = made.folder / "flow.log", []
    wait_for(lambda: "attempt" in log.read_text() or flow.poll() is not None, 300)
    for line in log.read_text().splitlines():
        if "Task run 'train" in line and " train/" in line:
            found.append(line.partition(" train/")[2].partition(":")[0])
    assert found, log.read_text()
    return f"train-{found[-1]}"


def _published(gang: str) -> list[dict]:
    """Metrics of the artifact in the store."""
    found = _store().read(f"{gang.replace('-', '/', 1)}/files/metrics.jsonl")
    return [json.loads(line) for line in found[0].splitlines()] if found else []


def _losses(lines: list[dict]) -> dict[int, float]:
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == len({line["step"] for line in steps}), "a step twice"
    return {line["step"]: line["lm_loss"] for line in steps}


def _store() -> Store:
    return open_store(os.environ["FINETUNE_STORE"], hasty=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gang_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("times", metavar="N", type=int, nargs="?", default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAULTS)
    parser.add_argument("--short", action="store_true", help=f"as 1 --only {' '.join(map(repr, FEW))}")
    parser.add_argument("--apart", action="store_true", help="a disk for each host, and the faults that need this")
    parser.add_argument("--minutes", type=float, help="one training of this time, with random faults")
    parser.add_argument("--every", metavar="MINUTES", type=float, default=5, help="with --minutes: between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", metavar="FOLDER", help="for logs of runs that went wrong; default: temporary files'")
    options = parser.parse_args()
    if options.short:
        options.times, options.only = 1, [*FEW]
    return options


if __name__ == "__main__":
    sys.exit(main())
