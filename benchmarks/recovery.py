"""Seconds from a killed rank or a lost host to the next step, compared with torchrun --max-restarts.

    python -m benchmarks.recovery [N] [--only NAME ...]      N faults of each kind; make recovery N=3

Two hosts, which are process groups of this machine, train a tiny GLM-4-MoE with a rank each and a checkpoint every 10
steps. Each fault comes after a later checkpoint. A gang has noticed a fault when its controller says stop. A lost host
is silent: all its processes are stopped. torchrun has an agent for each host and starts the same trainer; it does not
report when it notices a fault. NVRx is not measured: its wheels need glibc 2.39.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.workspace import marked, workspace
from conf.load import load
from tasks.gang.board import Board, newest_attempt
from tasks.store import open_store
from tests.support.flow_world import wait_for
from trainer.data import prepared
from trainer.rehearsal import tiny_models

ROOT = Path(__file__).parents[1]
INTERVAL, WITHIN = 10, 240.0
STEADY = 25.0  # seconds of training before a fault
CONF = """
name: gang
model: {source: made by trainer.tiny}
data: {seq_length: 64, template: "{input} {output}"}
adapter: {rank: 8, alpha: 16}
train: {steps: 1000000, global_batch: 12, micro_batch: 2, precision: fp32}
optimizer: {lr: 5e-3, warmup_steps: 5}
checkpoint: {save_every: 10}
gang: {start_within: 60, retries: 100}
layout: {nodes: 2}
"""


@dataclass
class Row:
    case: str
    noticed: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        shown = (f"{statistics.median(s):.1f}, {max(s):.1f}" if s else "" for s in (self.noticed, self.resumed))
        return "| " + " | ".join((self.case, *shown)) + " |"


@dataclass
class Training:
    """A training in a folder, which the processes of this benchmark run."""

    folder: Path
    faults: int = 0

    def lines(self) -> list[dict]:
        """What rank 0 has written; the last line may be half."""
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.folder / "files/metrics.jsonl").read_text().splitlines()]
        return []

    def step(self) -> int:
        return max((line["step"] for line in self.lines() if line["kind"] == "train"), default=0)

    def kill(self) -> None:
        """Kill the ranks in turn: a gang leaves out a host whose ranks die twice."""
        ranks = sorted(self.ranks(), key=lambda process: process.parents()[1].pid)
        ranks[self.faults % len(ranks)].kill()
        self.faults += 1

    def ranks(self) -> list[psutil.Process]:
        return [process for process in marked(os.environ["FINETUNE_BENCHMARK"]) if _is_rank(process)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("times", metavar="N", type=int, nargs="?", default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, default=[*CASES])
    options = parser.parse_args()
    rows = []
    with workspace("recovery") as folder:
        _make(folder)
        for name in options.only:
            rows.append(Row(name))
            CASES[name](folder, rows[-1], options.times)
            print(f"{rows[-1]} load {os.getloadavg()[1]:.0f}", flush=True)
    print("", "| fault | noticed: median, longest | next step |", "|---|---|---|", *rows, sep="\n")
    return 0


def _make(folder: Path) -> None:
    paths = ", ".join(f"{name}: {folder / name}" for name in ("model", "base", "data", "output", "parity", "logs"))
    (folder / "conf.yaml").write_text(f"{CONF}paths: {{{paths}}}\n")
    tiny_models.make_model("glm4-moe", folder / "model", dtype="float32")
    tiny_models.make_data(folder / "data", rows=64)
    convert = [sys.executable, "-m", "trainer.convert", str(folder / "conf.yaml"), "layout.nodes=1"]
    subprocess.run(convert, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _prepare(work: Path) -> None:
    work.mkdir(parents=True)
    prepared.make(load(work.parent / "conf.yaml", [f"paths.output={work / 'files'}"]))


def _killed_rank(folder: Path, row: Row, times: int) -> None:
    _gang(folder / "killed", row, times, lambda training: training.kill())


def _lost_host(folder: Path, row: Row, times: int) -> None:
    for number in range(times):  # the gang has one spare
        _gang(folder / f"lost{number}", row, 1, _silence, "gang.spares=1")


def _silence(training: Training) -> list[psutil.Process]:
    """Stop every process of a host, so that nothing reports the loss and connections stay open. Return them."""
    rank = random.choice(training.ranks())
    guard = next(process for process in rank.parents() if "tasks.run.guard" in process.cmdline())
    stopped = [guard, *guard.children(recursive=True)]
    for process in stopped:
        process.suspend()
    return stopped


def _gang(
    work: Path, row: Row, times: int, harm: Callable[[Training], list[psutil.Process] | None], *overrides: str
) -> None:
    store, training = work / "store", Training(work)
    _prepare(work)
    command = [
        sys.executable,
        "tests/tasks/gang/driver.py",
        "train",
        work.parent / "conf.yaml",
        work,
        store,
        *overrides,
    ]
    with _running([*map(str, command)], work):
        for _ in range(times):
            _until_a_checkpoint(training)
            board = Board(open_store(str(store)), work.name, newest_attempt(open_store(str(store)), work.name))
            stopped = harm(training) or []
            began, wall = time.monotonic(), time.time()
            wait_for(lambda board=board: (board.read("gang.json") or {})["state"] == "stop", WITHIN)
            row.noticed.append(time.monotonic() - began)
            for process in stopped:  # a lost host has none, and the folder is owned by processes that exist
                process.kill()
            _resumed(training, row, wall)


def _torchrun(folder: Path, row: Row, times: int) -> None:
    work = folder / "torchrun"
    _prepare(work)
    paths = [f"paths.output={work}/files", f"paths.logs={work}/logs", f"paths.parity={work}/files/parity.json"]
    with contextlib.ExitStack() as stack:
        command = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2", "--max-restarts", str(10 * times)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29417", "--rdzv-id", "recovery"]
        command += ["-m", "trainer.train", str(folder / "conf.yaml"), *paths]
        for node in range(2):
            stack.enter_context(_running(command, work / str(node)))
        training = Training(work)
        for _ in range(times):
            _until_a_checkpoint(training)
            training.kill()
            _resumed(training, row, time.time())


@contextlib.contextmanager
def _running(command: list[str], work: Path) -> Iterator[None]:
    work.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    with (work / "output.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(WITHIN)


def _until_a_checkpoint(training: Training) -> None:
    wait_for(lambda: training.step() > 0, WITHIN)
    time.sleep(STEADY)
    moment = (training.step() // INTERVAL + 1) * INTERVAL + random.randint(2, INTERVAL - 2)
    wait_for(lambda: training.step() >= moment, WITHIN)


def _resumed(training: Training, row: Row, wall: float) -> None:
    """Wait for the first step after the fault, and note its seconds."""

    def step() -> float | None:
        lines = training.lines()
        start = max((line["time"] for line in lines if line["kind"] == "start"), default=0.0)
        times = (line["time"] for line in lines if line["kind"] == "train" and line["time"] > start > wall)
        return next(times, None)

    wait_for(lambda: step() is not None, WITHIN)
    row.resumed.append((step() or wall) - wall)


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun has started the process, which may be a fork of torchrun."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and any("torchrun" in word for word in parent.cmdline()[1:4])
    return False


CASES = {"killed rank": _killed_rank, "lost host, a spare": _lost_host, "torchrun --max-restarts": _torchrun}


if __name__ == "__main__":
    sys.exit(main())
