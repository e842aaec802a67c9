"""One engine of vLLM, as the trainer asks it: over a connection, one thing at a time.

A LocalEngine is a process beside the trainer: it is started, asked over a socket pair, and gone when the trainer is.
Nobody else can reach the socket. What the process prints is in a log of its own. Engines of other hosts are in
trainer/reinforcement/engines/meeting.py.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.reinforcement import judge, messages
from trainer.reinforcement.transfer import wire

# What torchrun tells its ranks; vLLM would take it for its own.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
OF_RANKS += ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GROUP_WORLD_SIZE", "ROLE_NAME")
PROGRAM = "trainer.reinforcement.vllm_process"
SHOWN = 3  # last lines of a log
PATIENCE = 10  # seconds for a process to end by itself


class Lost(Fault):
    """An engine that answers no more: its process has ended, or an error that is no fault of the run's ends it."""


class Engine(ABC):
    """vLLM, wherever it is."""

    patience: float | None = None  # seconds in which a bucket of weights has to go over; None = as long as it takes
    address = "127.0.0.1"  # where it reaches the trainer

    def __init__(self, name: str, log: Path, connection: Connection):
        self.name, self.log, self.connection, self.version = name, log, connection, -1
        self.pipe: wire.Pipe | None = None
        self.started = self.joined = self.closed = False

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is gone."""

    @abstractmethod
    def is_gone(self) -> bool: ...

    @abstractmethod
    def end(self) -> str:
        """Say how it has ended, as far as that is known."""

    def watch(self, ended: Callable[["Engine"], None]) -> None:
        """Have somebody told as soon as it is gone before it is closed, whatever this process does meanwhile."""

        def wait() -> None:
            self.wait()
            if not self.closed:
                ended(self)

        threading.Thread(target=wait, name=f"watch over {self.name}", daemon=True).start()

    def ready(self) -> None:
        """Wait until vLLM has loaded the released model."""
        if not self.started:
            self.answer("start")
            self.started = True

    def call(self, name: str, **arguments: Any) -> Any:
        self.ask(name, arguments)
        return self.answer(name)

    def ask(self, name: str, arguments: dict[str, Any]) -> None:
        self.ready()
        try:
            messages.send(self.connection, (name, arguments))
        except OSError:
            raise self.lost(name) from None

    def answer(self, name: str) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self.lost(name) from None
        if "error" in answer:
            kind = Fault if answer["fault"] else Lost
            raise kind(f"rollout: {name}: {answer['error']} ({self.log})")
        self.version = answer["version"]
        return answer["result"]

    def close(self, patience: float = PATIENCE) -> None:
        """Have it end."""
        self.closed = True
        # Closing alone is not heard while another thread of this process reads.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as heard:
            heard.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def lost(self, name: str) -> Lost:
        return Lost(f"rollout: {name}: {self.end()}")


class LocalEngine(Engine):
    """vLLM in a process of its own beside this one."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path, environment: dict[str, str]):
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = start(theirs, settings, log, environment)
        super().__init__(name, log, Connection(mine.detach()))

    def wait(self) -> None:
        self.process.wait()

    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {' | '.join(line[:200] for line in lines[-SHOWN:])}" if self.process.returncode == 1 else ""
        return f"vLLM's process has ended with code {self.process.returncode}{last} ({self.log})"

    def close(self, patience: float = PATIENCE) -> None:
        super().close(patience)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(
    connection: socket.socket, settings: dict[str, Any], log: Path, environment: dict[str, str]
) -> subprocess.Popen:
    """Start vLLM's process, which answers over the connection and ends with this one.

    It reads its settings from its standard input, a file that has no name: nothing is left, however both end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not _is_of_ranks(name) and name != judge.KEY}
    with log.open("a") as file, tempfile.TemporaryFile("w+") as given:
        json.dump(settings, given)
        given.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(connection.fileno())],
            env=kept | environment,
            stdin=given,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[connection.fileno()],
            preexec_fn=end_with_parent,
        )


def _is_of_ranks(name: str) -> bool:
    return name in OF_RANKS or name.startswith(("TORCHELASTIC", "GANG_"))
