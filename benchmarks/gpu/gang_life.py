"""A gang of gang.py under way: its controllers one after another, its processes, its board, and the GPUs' memory."""

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SAVED = 10  # steps between checkpoints
MARK = "GANG_OF_TEST"  # in the environment of all that a gang starts
NEAR = 64  # MiB that nvidia-smi's figures of an idle GPU may differ by
PATIENCE = 150.0
# Another program that wants a GPU's memory: all of it from the first line on its standard input until that closes.
GREED = """
import sys, threading, torch
held, size, over = [torch.zeros(1, device="cuda")], 1 << 30, threading.Event()
print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.wait(0 if size > 1 << 21 else 0.01):
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size = max(size // 2, 1 << 21)
"""


@dataclass
class Gang:
    """One run, and its controllers one after another."""

    name: str
    folder: Path
    command: list[str]
    environment: dict[str, str]
    controller: subprocess.Popen | None = None
    greedy: subprocess.Popen | None = None
    before: set[int] = field(default_factory=set)  # ranks and their torchrun when the fault came; members may stay
    at: int = 0
    struck: float = 0.0
    attempt: int = 0
    said: int = 0

    def start(self) -> None:
        with (self.folder / "output.txt").open("a") as output:
            self.controller = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def ended(self) -> bool:
        return self.controller is None or self.controller.poll() is not None

    def strike(self, what: Callable[[], None]) -> None:
        ranks = self.ranks()
        self.before = {pid for rank in ranks for pid in (rank.pid, rank.ppid())}
        self.at, self.attempt = self.step(), self.attempts()
        self.said = len(self.output())
        what()
        self.struck = time.time()

    def pids(self) -> set[int]:
        """Ids of all processes that it has started, whosever children these are by now, without its controller."""
        found, mark = set(), f"{MARK}={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.add(int(path.parent.name))
        return found - {self.controller.pid if self.controller else 0}

    def children(self, *parents: str) -> list[psutil.Process]:
        """Its processes whose parent has one of these words in its command."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                above = process.parent()
                if above and {*parents} & {*above.cmdline()}:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        return self.children("trainer.startup.torchrun", "trainer.startup.torchrun_ahead")

    def members(self) -> list[psutil.Process]:
        return [process for process in self.children("tasks.run.guard") if "tasks.gang.member" in process.cmdline()]

    def lines(self) -> list[dict]:
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.folder / "files/metrics.jsonl").read_text().splitlines()]
        return []

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def board(self) -> Path:
        return self.folder.parent / "store/gangs" / self.folder.name

    def attempts(self) -> int:
        return max((int(path.name) for path in self.board().glob("[0-9]*")), default=0)

    def stopped(self) -> bool:
        place = self.board() / str(self.attempt)
        words = [_json(place / "gang.json"), *map(_json, place.glob("nodes/*.json"))]
        return words[0].get("state") == "stop" or any(word.get("reason") for word in words[1:])

    def wait_for_steps(self) -> None:
        """Wait for a random number of steps since the last start, past a checkpoint. It begins where nobody has."""
        if self.controller is None:
            self.start()
        since, number = self.struck, random.randint(SAVED + 1, 2 * SAVED - 1)

        def there() -> bool:
            starts = [line for line in self.lines() if line["kind"] == "start" and line["time"] > since]
            return bool(starts) and self.step() >= starts[-1]["step"] + number

        wait(lambda: there() or self.ended(), self)


def release(gang: Gang) -> None:
    if gang.greedy and gang.greedy.stdin:
        gang.greedy.stdin.close()
        gang.greedy.wait()
    gang.greedy = None


def end(gang: Gang) -> None:
    release(gang)
    assert gang.controller
    gang.controller.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        gang.controller.wait(30)
    gang.controller.kill()
    gang.controller.wait()
    with contextlib.suppress(TimeoutError):
        wait(lambda: not gang.pids(), gang, seconds=20)


def losses(lines: list[dict]) -> dict[int, float]:
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == len({line["step"] for line in steps})
    return {line["step"]: line["lm_loss"] for line in steps}


def memory() -> list[int]:
    """MiB in use on each GPU."""
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.split()]
    return []


def free(idle: list[int]) -> bool:
    return all(now <= then + NEAR for now, then in zip(memory(), idle, strict=True))


def wait(what: Callable[[], bool], gang: Gang, every: float = 0.05, seconds: float = PATIENCE) -> None:
    until = time.time() + seconds
    while not what():
        if time.time() > until:
            raise TimeoutError(f"{gang.name}: {gang.output()[-2000:]}")
        time.sleep(every)


def _json(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}
