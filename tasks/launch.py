"""Starts a trainer command for one resolved configuration, and passes on what it says.

The command runs under tasks/guard.py: it ends when this process does. Exit code 2 is a fault of the user's, whose line
the trainer printed; it becomes a Fault. Any other failure shows the last lines, and where the rest is.
"""

import collections
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from conf.load import dump
from conf.schema import Run
from tasks.faults import Fault, Stopped

ROOT = Path(__file__).resolve().parent.parent
TICK = 0.5
SHOWN = 20  # last lines of a failed command
LONGEST = 1 << 16  # bytes of a line; the rest is the next one

# What a trainer has no use for, and a log of its environment should not hold.
PRIVATE = ("AWS_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_", "PREFECT_", "WANDB_API_KEY")


class Broken(RuntimeError):
    """A command failed through no fault of the caller's that it knows of."""


def trainer(
    command: str,
    run: Run,
    folder: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
    keep: Collection[str] = (),
    changed: dict[str, str] | None = None,
) -> None:
    """python -m trainer.<command>; its log is <folder>/<command>.log, tick() is called twice a second.

    `keep` names private variables of the environment that this command needs all the same; `changed` are others.
    """
    resolved = folder / "resolved.yaml"
    dump(run, resolved)
    process([f"trainer.{command}", str(resolved)], folder / f"{command}.log", say, stop, tick, keep, changed)


def process(
    arguments: list[str],
    log: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
    keep: Collection[str] = (),
    changed: dict[str, str] | None = None,
) -> None:
    """python -m <arguments> to its end. Raises Fault, Broken or Stopped."""
    private = {name for name in os.environ if name.startswith(PRIVATE) and name not in keep}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)} | (changed or {})
    running = subprocess.Popen(
        [sys.executable, "-m", "tasks.guard", sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
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
            running.stdin.close()  # also when tick or say has failed: the guard ends the command
            running.wait()
    tick()
    if stopped:
        raise Stopped(f"{arguments[0]}: stopped")
    if running.returncode == 2:
        faults = [line.removeprefix("error: ") for line in last if line.startswith("error: ")]
        raise Fault("\n".join(faults or last) or f"{arguments[0]} ended with code 2 and said nothing; see {log}")
    if running.returncode:
        shown = "\n".join(last) or "(none)"
        raise Broken(f"{arguments[0]} failed with code {running.returncode}; its last lines, of {log}:\n{shown}")


def _lines(output: int, running: subprocess.Popen) -> Iterator[str | None]:
    """Lines as they come, and None every TICK, also while there are many or none. Holds one line at a time."""
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
        elif running.poll() is not None:  # the guard was killed, and something that it started keeps the pipe open
            return
