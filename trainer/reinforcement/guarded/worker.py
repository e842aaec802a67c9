"""Run untrusted code for rewards and environments in a process that can only compute and import installed packages.

The process starts with an empty environment. Before it runs untrusted code, it gives up its rights (rights.py): it has
no network, cannot start programs, read or write files or send signals, and has limits on time and memory. Answers are
judged one at a time. If a user's function takes too long or ends the process, the run ends with one line.

    python -m trainer.reinforcement.guarded.process DESCRIPTOR    the program of that process
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
from contract.faults import Fault, named
from contract.processes import end_with_parent

STARTS_WITHIN = 60.0  # seconds
ENVIRONMENT = "environment"
KEYS = {ENVIRONMENT: "reinforce.environment", "function": "reinforce.function"}
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Question:
    """An answer, with the prompt and the reference for its reward."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class Conversation:
    """The model's answers so far, to which an environment replies."""

    prompt: str
    answers: list[str]
    reference: str


class Worker:
    """A guarded process for one kind of code. If it has died, the next call starts it again."""

    def __init__(self, kind: str, function: str | None, seconds: float, memory_gb: float):
        self.kind, self.seconds, self.key = kind, seconds, KEYS.get(kind, "reinforce.reward")
        self.settings: dict[str, Any] = {"kind": kind, "memory_gb": memory_gb}
        if function is not None:
            with named(self.key):
                name, source = rewards.function(function, rewards.CALLED_WITH[kind])
            self.settings |= {"name": name, "source": source, "file": Path(function.rpartition(":")[0]).name}
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self._start()  # a function that cannot be loaded is reported before sampling starts

    def rewards(self, questions: Sequence[Question]) -> list[float]:
        return [self._reward(question) for question in questions]

    def replies(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """Return the next reply in each conversation; None if the conversation is over."""
        return [self._reply(conversation) for conversation in conversations]

    def close(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self.connection:
            self.connection.close()
            self.connection = None

    def _reward(self, question: Question) -> float:
        result = self._exchange(asdict(question), self.seconds, "reinforce.reward_seconds")
        # A model's program may do anything, and then gets the reward 0. The user's function must not fail.
        if self.kind == "code":
            return result["reward"] if 0 <= result.get("reward", -1) <= 1 else 0.0
        if "refused" in result:
            place = f"reinforce.reward: {self.kind}: for the answer {question.answer[:60]!r}"
            raise Fault(f"{place}: {result['refused']}")
        return result["reward"]

    def _reply(self, conversation: Conversation) -> str | None:
        result = self._exchange(asdict(conversation), self.seconds, "reinforce.reward_seconds")
        if "refused" in result:
            raise Fault(f"{self.key}: after the answer {conversation.answers[-1][:60]!r}: {result['refused']}")
        return result["text"]

    def _start(self) -> None:
        own_end, far_end = socket.socketpair()
        with far_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.reinforcement.guarded.process", str(far_end.fileno())],
                env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.connection = Connection(own_end.detach())
        result = self._exchange(self.settings, STARTS_WITHIN, "to load the file")
        if "refused" in result:
            self.close()
            raise Fault(f"{self.key}: {self.settings.get('name', self.kind)}: {result['refused']}")

    def _exchange(self, message: dict[str, Any], seconds: float, limit: str) -> dict[str, Any]:
        """Send a message and return the answer in plain types: data of the guarded process are never unpickled."""
        if self.process is None:
            self._start()
        assert self.connection and self.process
        try:
            self.connection.send_bytes(json.dumps(message).encode())
            if not self.connection.poll(seconds):
                self.close()
                return {"refused": f"no end within {seconds:g} s ({limit})"}
            result = json.loads(self.connection.recv_bytes(1 << 16))
            if "refused" in result:
                return {"refused": _printable(str(result["refused"])[:300])}
            if self.kind == ENVIRONMENT:
                return {"text": None if result["text"] is None else str(result["text"])}
            return {"reward": float(result["reward"])}
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may only have closed its connection
                self.process.wait(1)
            code = self.process.returncode
            self.close()
            return {"refused": f"it has ended its process ({_code(code)})"}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # it may have forged the reply
            self.close()
            return {"refused": f"its result is not a {'text' if self.kind == ENVIRONMENT else 'number'}"}


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _code(code: int | None) -> str:
    if code is None:
        return "its connection"
    if code < 0:
        name = signal.Signals(-code).name
        return {"SIGSYS": "a forbidden system call", "SIGXCPU": "time", "SIGSEGV": "memory"}.get(name, name)
    return f"code {code}"
