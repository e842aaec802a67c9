"""One process of vLLM beside the trainer: it is started, asked over a socket pair, and gone when the trainer is.

Nobody else can reach the socket. What the process prints is in a log of its own.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.reinforcement import messages
from trainer.reinforcement.transfer import wire

# What torchrun tells its ranks; vLLM would take it for its own.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
OF_RANKS += ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GROUP_WORLD_SIZE", "ROLE_NAME")
PROGRAM = "trainer.reinforcement.vllm_process"
SHOWN = 3  # last lines of a log
PATIENCE = 10  # seconds for a process to end by itself


class Lost(Fault):
    """An engine that answers no more: its process has ended, or an error that is no fault of the run's ends it."""


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path, environment: dict[str, str]):
        self.name, self.log, self.version = name, log, -1
        log.parent.mkdir(parents=True, exist_ok=True)
        self.settings = tempfile.NamedTemporaryFile("w", prefix="rollout-", suffix=".json")  # noqa: SIM115
        json.dump(settings, self.settings)
        self.settings.flush()
        mine, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items() if not _is_of_ranks(name)}
        with log.open("a") as file, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno()), self.settings.name],
                env=kept | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                preexec_fn=end_with_parent,
            )
        self.connection = Connection(mine.detach())
        self.pipe: wire.Pipe | None = None
        self.started = self.joined = self.closed = False

    def watch(self, ended: Callable[["Engine"], None]) -> None:
        """Have somebody told as soon as the process ends before it is closed, whatever this one does meanwhile."""

        def wait() -> None:
            self.process.wait()
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
            raise self._gone(name) from None

    def answer(self, name: str) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone(name) from None
        if "error" in answer:
            kind = Fault if answer["fault"] else Lost
            raise kind(f"rollout: {name}: {answer['error']} ({self.log})")
        self.version = answer["version"]
        return answer["result"]

    def close(self, patience: float = PATIENCE) -> None:
        self.closed = True
        # Closing alone is not heard while another thread of this process reads.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as heard:
            heard.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.settings.close()

    def _gone(self, name: str) -> Lost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {' | '.join(line[:200] for line in lines[-SHOWN:])}" if self.process.returncode == 1 else ""
        return Lost(f"rollout: {name}: vLLM's process has ended with code {self.process.returncode}{last} ({self.log})")


def _is_of_ranks(name: str) -> bool:
    return name in OF_RANKS or name.startswith(("TORCHELASTIC", "GANG_"))
