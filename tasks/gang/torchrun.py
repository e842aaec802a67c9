"""Torchrun on this host, and the process that waits to be torchrun of the next attempt.

While ranks train, this process imports the same modules and waits (trainer/startup/torchrun_ahead.py). If the host
continues after a failure, its new ranks need no imports. A host that starts again prepares it while it waits for the
others. It takes about 1 GB of host memory. If it has ended or there is none, torchrun starts as usual.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


class Torchrun:
    def __init__(self, folder: Path | None = None):
        self.folder = folder  # None: no process waits for a next attempt
        self._ahead: subprocess.Popen | None = None
        self.asked = 0.0  # when a spare host last asked for the modules

    @property
    def prepared(self) -> bool:
        return self._ahead is not None

    def start(self, arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
        log.touch()
        ahead, self._ahead = self._ahead, None
        if ahead and ahead.poll() is None and _send(ahead, arguments, environment, log):
            return ahead
        return _popen(["trainer.startup.torchrun", *arguments], environment, log, subprocess.DEVNULL)

    def prepare(self, modules: bytes, environment: dict[str, str], count: int) -> None:
        """Start the process that waits, if there is none. `count` is the number of ranks of this host."""
        if self._ahead is None and self.folder:
            path = self.folder / "modules.json"
            path.write_bytes(modules)
            environment = environment | {"LOCAL_WORLD_SIZE": str(count)}  # its share of the cores
            command = ["trainer.startup.torchrun_ahead", str(path)]
            self._ahead = _popen(command, environment, self.folder / "ahead.log", subprocess.PIPE)

    def end(self) -> None:
        if self._ahead:
            self._ahead.kill()
            self._ahead.wait()


def _send(ahead: subprocess.Popen, arguments: list[str], environment: dict[str, str], log: Path) -> bool:
    assert ahead.stdin
    try:
        content = {"arguments": arguments, "environment": environment, "log": str(log)}
        ahead.stdin.write(json.dumps(content).encode() + b"\n")
        ahead.stdin.close()
    except OSError:
        return False
    return True


def _popen(command: list[str], environment: dict[str, str], log: Path, stdin: int) -> subprocess.Popen:
    parent = [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid())]
    with log.open("a") as out:
        return subprocess.Popen(
            [*parent, sys.executable, "-m", *command], stdin=stdin, stdout=out, stderr=out, env=environment
        )


# The kernel ends torchrun if its parent is killed, and the ranks end with torchrun.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
