"""Code of others in a process that can compute, import what is installed, and do nothing else: rewards, environments.

The process is started with an empty environment and gives up what it could do harm with, before it runs a line of that
code (rights.py): it has no network, starts no program, reads and writes no file, signals nobody, and has limits on time
and memory. Answers are judged one at a time; a function that takes too long, or ends the process, ends the run with one
line.

    python -m trainer.reinforcement.guarded.process DESCRIPTOR    what runs there
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conf import rewards
from contract.faults import Fault
from contract.processes import end_with_parent

STARTS_WITHIN = 60.0  # seconds
ENVIRONMENT = "environment"
KEYS = {ENVIRONMENT: "reinforce.environment", "function": "reinforce.function"}
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Question:
    """An answer, with what a reward may know besides."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class Conversation:
    """Answers of the model's so far, for an environment to reply to."""

    prompt: str
    answers: list[str]
    reference: str


class Worker:
    """A guarded process for one kind of code, started when it is first asked and after each death."""

    def __init__(self, kind: str, function: str | None, seconds: float, memory_gb: float):
        self.kind, self.seconds, self.memory_gb = kind, seconds, memory_gb
        self.name, self.source, self.file = "", "", ""
        self.key = KEYS.get(kind, "reinforce.reward")
        if function is not None:
            try:
                self.name, self.source = rewards.function(function, rewards.CALLED_WITH[kind])
            except Fault as fault:
                raise Fault(f"{self.key}: {fault}") from None
            self.file = Path(function.rpartition(":")[0]).name
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self._start()  # so that a function that cannot be loaded is told before anything is sampled

    def rewards(self, questions: Sequence[Question]) -> list[float]:
        return [self._one(question) for question in questions]

    def replies(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """The text that comes next in each conversation; None where it is over."""
        return [self._reply(one) for one in conversations]

    def close(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self.connection:
            self.connection.close()
            self.connection = None

    def _one(self, question: Question) -> float:
        if self.process is None:
            self._start()
        what = f"reinforce.reward: {self.kind}: for the answer {question.answer[:60]!r}"
        found = self._ask(asdict(question), self.seconds, "reinforce.reward_seconds")
        # Code that a model has written may do anything: it is worth nothing then. A function of one's own may not.
        if self.kind == "code":
            return found["reward"] if 0 <= found.get("reward", -1) <= 1 else 0.0
        if "refused" in found:
            raise Fault(f"{what}: {found['refused']}")
        return found["reward"]

    def _reply(self, one: Conversation) -> str | None:
        if self.process is None:
            self._start()
        found = self._ask(asdict(one), self.seconds, "reinforce.reward_seconds")
        if "refused" in found:
            raise Fault(f"{self.key}: behind the answer {one.answers[-1][:60]!r}: {found['refused']}")
        return found["text"]

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.reinforcement.guarded.process", str(theirs.fileno())],
                env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.connection = Connection(mine.detach())
        asked = {"kind": self.kind, "source": self.source, "file": self.file, "name": self.name}
        asked |= {"memory_gb": self.memory_gb}
        found = self._ask(asked, STARTS_WITHIN, "to load the file")
        if "refused" in found:
            self.close()
            raise Fault(f"{self.key}: {self.name or self.kind}: {found['refused']}")

    def _ask(self, message: dict[str, Any], seconds: float, limit: str) -> dict[str, Any]:
        """The answer, of plain types: nothing of the other side's is unpickled here."""
        assert self.connection and self.process
        try:
            self.connection.send_bytes(json.dumps(message).encode())
            if not self.connection.poll(seconds):
                self.close()
                return {"refused": f"no end within {seconds:g} s ({limit})"}
            found = json.loads(self.connection.recv_bytes(1 << 16))
            if "refused" in found:
                return {"refused": _printable(str(found["refused"])[:300])}
            if self.kind == ENVIRONMENT:
                return {"text": None if found["text"] is None else str(found["text"])}
            return {"reward": float(found["reward"])}
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may only have closed its connection
                self.process.wait(1)
            code = self.process.returncode
            self.close()
            return {"refused": f"it has ended its process ({_code(code)})"}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # it may have forged the reply
            self.close()
            return {"refused": f"what it returned is no {'text' if self.kind == ENVIRONMENT else 'number'}"}


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _code(code: int | None) -> str:
    if code is None:
        return "its connection"
    if code < 0:
        name = signal.Signals(-code).name
        return {"SIGSYS": "what it tried is forbidden", "SIGXCPU": "time", "SIGSEGV": "memory"}.get(name, name)
    return f"code {code}"
