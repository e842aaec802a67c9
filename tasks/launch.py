"""Starts a trainer command for one resolved configuration, and passes on what it says.

The command runs under tasks/guard.py: it ends when this process does. Exit code 2 is a fault of the user's, whose line
the trainer printed; it becomes a Fault. Any other failure shows the last lines, and where the rest is.
"""

import collections
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from conf.load import dump
from conf.schema import Run
from tasks.faults import Fault

ROOT = Path(__file__).resolve().parent.parent
TICK = 0.5
SHOWN = 20  # last lines of a failed command

# What a trainer has no use for, and a log of its environment should not hold.
PRIVATE = ("AWS_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_", "PREFECT_API_KEY", "WANDB_API_KEY")


class Broken(RuntimeError):
    """A command failed through no fault of the caller's that it knows of."""


class Stopped(RuntimeError):
    """The flow is being cancelled, or the work is somebody else's by now."""


def trainer(
    command: str,
    run: Run,
    folder: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """python -m trainer.<command>; its log is <folder>/<command>.log, tick() is called twice a second."""
    resolved = folder / "resolved.yaml"
    dump(run, resolved)
    process([f"trainer.{command}", str(resolved)], folder / f"{command}.log", say, stop, tick)


def process(
    arguments: list[str],
    log: Path,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """python -m <arguments> to its end. Raises Fault, Broken or Stopped."""
    private = {name for name in os.environ if name.startswith(PRIVATE)}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, "-m", "tasks.guard", sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        errors="replace",
        text=True,
    )
    assert running.stdin and running.stdout
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(running.stdout, lines), daemon=True)
    reader.start()
    last: collections.deque[str] = collections.deque(maxlen=SHOWN)
    stopped = False
    with log.open("a") as file:
        try:
            while running.poll() is None or reader.is_alive() or not lines.empty():
                if not stopped and stop():
                    stopped = True
                    running.stdin.close()
                _pass_on(lines, file, last, say)
                tick()
        finally:
            running.stdin.close()  # also when tick or say has failed: the guard ends the command
            running.wait()
    tick()
    if stopped:
        raise Stopped(f"{arguments[0]}: stopped")
    if running.returncode == 2:
        faults = [line.removeprefix("error: ") for line in last if line.startswith("error: ")]
        raise Fault("\n".join(faults or last))
    if running.returncode:
        raise Broken(f"{arguments[0]} failed with code {running.returncode}; its last lines:\n" + "\n".join(last))


def _read(stream, lines: queue.SimpleQueue) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put("")  # wakes the one who waits for more


def _pass_on(lines: queue.SimpleQueue, file, last: collections.deque, say: Callable[[str], None]) -> None:
    """Lines as they come, for at most TICK."""
    until = time.monotonic() + TICK
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return
        if not line:
            return
        file.write(line + "\n")
        file.flush()
        last.append(line)
        say(line)
