"""vLLM engines, as the trainer calls them: over a connection, one call at a time, alone or in a group.

A LocalEngine is a process on the trainer's host. The trainer starts it and calls it over a socket pair, which no other
process can reach. It ends with the trainer, and its output goes to a log file. Engines on other hosts are in
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
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.reinforcement import judge, messages
from trainer.reinforcement.transfer import wire
from trainer.serving import hosts
from trainer.startup.console import say

# Beginnings of the environment variables that vLLM must not get: torchrun's, the gang's, and the judge's key.
NOT_INHERITED = (*hosts.OF_TORCHRUN, "OMP_NUM_THREADS", "GANG_", judge.KEY)
PROGRAM = "trainer.reinforcement.vllm_process"
SHOWN = 3  # last lines of a log
PATIENCE = 10  # seconds for a process to end before it is killed


class Lost(Fault):
    """An engine no longer answers: its process has ended, or failed with an error that is not a Fault."""


class Engine(ABC):
    """An engine of vLLM, on this host or on another."""

    patience: float | None = None  # seconds for the transfer of a bucket of weights; None = no limit
    address = "127.0.0.1"  # of the trainer, for this engine

    def __init__(self, name: str, log: Path, connection: Connection):
        self.name, self.log, self.connection, self.version = name, log, connection, -1
        self.pipe: wire.Pipe | None = None
        self.started = self.joined = self.closed = False

    @abstractmethod
    def wait(self) -> None:
        """Wait until the engine has ended."""

    @abstractmethod
    def is_gone(self) -> bool: ...

    @abstractmethod
    def end(self) -> str:
        """Return a text on how the engine has ended, as far as it is known."""

    def watch(self, ended: Callable[["Engine"], None]) -> None:
        """Call ended(engine) from a thread as soon as the engine has ended before it was closed."""

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
        """Close the connection, which makes the engine end."""
        self.closed = True
        # While another thread of this process reads, only a shutdown reaches the other end.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def lost(self, name: str) -> Lost:
        return Lost(f"rollout: {name}: {self.end()}")


class LocalEngine(Engine):
    """vLLM in a separate process on this host."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path, environment: dict[str, str]):
        trainer_end, engine_end = socket.socketpair()
        with engine_end:
            self.process = start(engine_end, settings, log, environment)
        super().__init__(name, log, Connection(trainer_end.detach()))

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


class Group:
    """Engines of vLLM that get the same calls. An engine that ends is removed, unless it is the last."""

    def __init__(self, started: int, far: bool):
        self.engines: list[Engine] = []
        self.started, self.far, self.closing = started, far, False

    def each(self, name: str, **arguments: Any) -> dict[Engine, Any]:
        """Call every engine. Returns the result of each."""
        return self.answers(self.ask(name, arguments), name)

    def ask(self, name: str, arguments: dict[str, Any]) -> list[Engine]:
        """Send a call to every engine. Return the engines that have received it."""
        return self.attempt_each(lambda engine: engine.ask(name, arguments))

    def answers(self, asked: Iterable[Engine], name: str) -> dict[Engine, Any]:
        """Wait for the answers to a call."""
        return {engine: result for engine in asked for result in self.attempt(engine, partial(engine.answer, name))}

    def attempt_each(self, call: Callable[[Engine], Any]) -> list[Engine]:
        """Make a call with every engine. Return the engines for which it succeeded."""
        return [engine for engine in [*self.engines] for _ in self.attempt(engine, partial(call, engine))]

    def attempt(self, engine: Engine, call: Callable[[], Any]) -> list[Any]:
        """Return the result of the call in a list; an empty list if the engine is lost and other engines remain.

        An engine that was removed before is not called: a caller may still hold it from an earlier call.
        """
        if engine not in self.engines:
            return []
        try:
            return [call()]
        except Lost as lost:
            if len(self.engines) == 1 and self.far and not self.closing:
                raise RuntimeError(f"{lost}; no host of vLLM's is left") from None  # the next attempt has others
            if len(self.engines) == 1 or self.closing:
                raise
            self.engines.remove(engine)
            engine.close(patience=0)
            say(f"{lost}; {engine.name} is removed, and {len(self.engines)} of {self.started} engines continue")
            return []


def start(
    connection: socket.socket, settings: dict[str, Any], log: Path, environment: dict[str, str]
) -> subprocess.Popen:
    """Start vLLM's process, which answers over the connection and ends with this process.

    The process reads its settings from its standard input. This is an unnamed file, so nothing of it remains on disk.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    with log.open("a") as file, tempfile.TemporaryFile("w+") as stdin:
        json.dump(settings, stdin)
        stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(connection.fileno())],
            env=inherited | environment,
            stdin=stdin,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[connection.fileno()],
            preexec_fn=end_with_parent,
        )
