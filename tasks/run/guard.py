"""Run a command and end all its processes when the caller ends, even if the caller is killed.

    python -m tasks.run.guard [--grace=SECONDS] COMMAND ...     the caller holds its standard input open

Standard input is a pipe without a writer. It closes when the caller dies or wants to end the command. The command then
gets SIGTERM, its grace to end (a training saves a checkpoint), then SIGKILL. A SIGTERM to the guard does the same.
Processes of the command become children of the guard when their parents die (it is their subreaper), and are killed
before the guard ends. If the guard itself is killed, the kernel kills the command, and torchrun's ranks end themselves
(trainer/startup/entry.py). The exit code is the command's.

The guard imports only the standard library and one small module of contract/, so it starts in 30 ms.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from contract.processes import end_with_parent

GRACE = 5.0  # seconds, for a command that saves nothing: a cancelled run has no processes after 10 s
OPTION = "--grace="
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36

libc = ctypes.CDLL(None, use_errno=True)


def main(*arguments: str) -> int:
    """Run the command, and return its exit code."""
    has_grace = arguments[0].startswith(OPTION)
    grace, command_line = (float(arguments[0][len(OPTION) :]), arguments[1:]) if has_grace else (GRACE, arguments)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (*ENDS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    me = os.getpid()
    os.environ["GUARD_PID"] = str(me)  # a process whose parent is the guard may have lost its original parent
    try:
        command = subprocess.Popen(
            command_line, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: end_with_parent(me)
        )
    except OSError as error:
        print(f"{command_line[0]}: {error.strerror}", file=sys.stderr)
        return 127
    ends_at = None
    while command.poll() is None:
        left = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        watched = [wake_read] if ends_at else [wake_read, 0]
        ready, _, _ = select.select(watched, [], [], left)
        signals = os.read(wake_read, 64) if wake_read in ready else b""
        if ends_at is None and (0 in ready or {*ENDS} & {*signals}):
            ends_at = time.monotonic() + grace
            _signal(command.pid, signal.SIGTERM)
        elif ends_at and time.monotonic() >= ends_at:
            _signal(command.pid, signal.SIGKILL)
            command.wait()
    _kill_all_descendants()
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def guarded(command: list[str], grace: float = GRACE, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a command under this guard, with `grace` seconds to end."""
    return [python, "-m", "tasks.run.guard", f"{OPTION}{grace:g}", *command]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_all_descendants() -> None:
    """Kill descendants until none exists. The next round finds processes that were just forked."""
    while pids := _children(os.getpid()):
        for pid in pids:
            _signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # its children become children of the guard


def _children(parent: int) -> list[int]:
    """Return child processes from all stat files in /proc, because not every kernel lists a process's children."""
    children = []
    for entry in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[1]) == parent:
            children.append(int(entry))
    return children


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
