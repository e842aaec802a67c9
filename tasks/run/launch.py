"""Start a trainer command for one resolved configuration, and forward its output.

The command runs under tasks/run/guard.py, so it ends when this process ends. Exit code 2 is a user error: the line that
the trainer has printed becomes a Fault. Any other failure shows the last lines and the path of the log.
"""

import collections
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.host import gpu_locks
from conf.load import dump
from conf.schema.run import Run
from contract.faults import Broken, Fault, Stopped
from tasks.run.guard import GRACE, guarded

ROOT = Path(__file__).resolve().parents[2]
TICK = 0.5
SHOWN = 20  # last lines of a failed command
LONGEST = 1 << 16  # bytes of a line; the rest becomes the next line

# Variables that a trainer does not use and that must not appear in a log of its environment.
PRIVATE = ("AWS_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_", "PREFECT_", "VLLM_API_KEY", "WANDB_API_KEY")


# Signals caused by the process's native code: the next start would end in the same way.
OWN_DOING = {128 + number for number in (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)}


class Crashed(Broken):
    """A command that crashed in native code without a message (segmentation fault, abort)."""


@dataclass(frozen=True)
class Turn:
    """The turn of a command that uses this host's GPUs."""

    what: str  # name that waiting commands report
    waits: Callable[[str], None]  # called with the reason for waiting
    has: Callable[[tuple[str, ...]], None] = lambda _: None  # called with its GPUs
    gpus: int | None = None  # None = all GPUs of this process
    flow: str = ""  # turns of one flow are ordered by rank
    rank: int = 0


def trainer(command: str, run: Run, folder: Path) -> tuple[list[str], Path]:
    """Write the configuration of python -m trainer.<command> to the folder. Returns arguments and log for process()."""
    resolved = folder / "resolved.yaml"
    dump(run, resolved)
    return [f"trainer.{command}", str(resolved)], folder / f"{command}.log"


def process(
    arguments: list[str],
    log: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
    keep: Collection[str] = (),
    changed: dict[str, str] | None = None,
    turn: Turn | None = None,
    grace: float = GRACE,
) -> None:
    """Run python -m <arguments> to its end. Raise Fault, Broken or Stopped. If stopped, it has `grace` seconds to end.

    tick() is called twice a second. `keep` names private environment variables that this command needs; `changed` has
    additional variables. With a turn, the command first waits for its share of this host's GPUs. The guard holds them
    until all its processes have ended.
    """
    private = {name for name in os.environ if name.startswith(PRIVATE) and name not in keep}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)} | (changed or {})
    hold = gpu_locks.Hold()
    if turn:
        hold = gpu_locks.take(turn.what, turn.waits, stop, None, turn.gpus, turn.flow, turn.rank)
    if hold is None:
        raise Stopped(f"{arguments[0]}: stopped while it waited for GPUs")
    with contextlib.closing(hold):
        if turn:
            turn.has(hold.gpus)
        running = subprocess.Popen(
            guarded([sys.executable, "-m", *arguments], grace),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment | hold.environment,
            pass_fds=hold.descriptors,
        )
    assert running.stdin and running.stdout
    last: collections.deque[str] = collections.deque(maxlen=SHOWN)
    stopped = False
    with running.stdout as output, log.open("a", encoding="utf-8") as file:
        try:
            for line in _lines(output.fileno(), running):
                if line is None:
                    file.flush()
                    tick()
                    if not stopped and stop():
                        stopped = True
                        running.stdin.close()
                    continue
                file.write(line + "\n")
                last.append(line)
                say(line)
        finally:
            running.stdin.close()  # after a failed tick or say too: the guard then ends the command
            running.wait()
    tick()
    if stopped:
        raise Stopped(f"{arguments[0]}: stopped")
    if running.returncode == 2:
        faults = [line.removeprefix("error: ") for line in last if line.startswith("error: ")]
        raise Fault("\n".join(faults or last) or f"{arguments[0]} ended with code 2 and without a message; see {log}")
    if running.returncode:
        shown = "\n".join(last) or "(none)"
        kind = Crashed if running.returncode in OWN_DOING else Broken
        raise kind(f"{arguments[0]} failed with {_code(running.returncode)}; the last lines of {log}:\n{shown}")


def _code(code: int) -> str:
    """Describe an exit code with its meaning: 139 is a segmentation fault."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"code {code} ({signal.strsignal(signal.Signals(code - 128))})"
    return f"code {code}"


def _lines(output: int, running: subprocess.Popen) -> Iterator[str | None]:
    """Yield lines of the output, and None every TICK seconds. Only one line at a time is in memory."""
    pending, ticks_at = b"", time.monotonic()
    while True:
        now = time.monotonic()
        if now >= ticks_at:
            yield None
            ticks_at = now + TICK
        if select.select([output], [], [], max(0.0, ticks_at - time.monotonic()))[0]:
            block = os.read(output, 1 << 13)
            *whole, pending = (pending + block).split(b"\n")
            if pending and (not block or len(pending) >= LONGEST):
                whole, pending = [*whole, pending], b""
            yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
            if not block:
                return
        elif running.poll() is not None:  # the guard was killed, and another process still holds the pipe open
            return
