"""Messages between a gang's controller and its members: a dataclass per message, JSON in between.

    Word        gang.json        the controller: gathering, go or stop
    Task        task.json        the controller: what the members of the attempt run
    Peers       peers.json       the controller: where each member answers
    Member      nodes/<k>.json   a member: what it is and does; with a Sign of each rank, or the End of each
    Standing    a port           whoever is asked where the store does not answer (peer_probe.py)

A field without a default is always written, one with a default where it has another value. Who takes part reads
strictly: an unknown key, a missing one or one of another type is a Fault of one line, as it comes from another version
of this project. Who looks back at an attempt, of whatever version, reads Board.read(): flows.logs, previous_attempt.py.
"""

import functools
import json
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from contract.faults import Fault

Address = tuple[str, int]  # host and port
STRICT = ConfigDict(strict=True, extra="forbid")


class Message:
    """Base of all messages, with from_json() and to_json()."""

    __pydantic_config__ = STRICT

    def to_json(self) -> bytes:
        content = asdict(self)  # type: ignore[call-overload]
        for one in fields(self):  # type: ignore[arg-type]
            if one.default is not MISSING and content[one.name] == one.default:
                del content[one.name]
        return json.dumps(content, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Read a message. Raises Foreign, which names `where` it was read."""
        return _read(data, cls, cls, where)


class Foreign(Fault):
    """A message that another version of the project has written. A store that is away raises Faults of other kinds."""


@dataclass(frozen=True)
class Word(Message):
    """Message of the controller. It is renewed every few seconds, or it is worth nothing."""

    by: str  # which process wrote it
    state: Literal["gathering", "go", "stop"]
    beat: int = 0  # a renewal changes it
    probe: str = ""  # a file on the storage that all hosts share
    addresses: tuple[str, ...] = ()  # of the controller's host
    port: int = 0  # where it answers
    order: tuple[int, ...] = ()  # go: members, in the order of their ranks
    master: Address | None = None  # go: where ranks meet
    key: str = ""  # go: secret with which hosts are let in there
    reason: str = ""  # stop: why
    save: bool = False  # stop: a checkpoint first
    closed: bool = False  # no member is left


@dataclass(frozen=True)
class Task(Message):
    """Task of the members: a command of the trainer, which each runs below torchrun."""

    command: str
    nodes: int  # members whose ranks run it together, the first in order
    gpus: int  # of each host; 0 = it computes on CPUs
    ranks: int  # that torchrun starts on each host
    helps: str = ""  # command of the members behind these: each has ranks of its own, which come to the first one's
    helpers: int = 0  # ranks of each of these


@dataclass(frozen=True)
class Sign(Message):
    """State of a rank, by its own account and by its process."""

    rank: int
    pid: int
    step: int
    phase: str
    age: float  # seconds since its thread of life wrote
    idle: float  # seconds since its last step
    state: str  # of the process in /proc, as T or D; empty where there is none
    silent: bool
    stalled: bool


@dataclass(frozen=True)
class End(Message):
    """End of a rank, and the last lines that it printed."""

    rank: int
    code: int | None  # exit code, negative = signal; None = it was alive
    step: int
    lines: tuple[str, ...]
    silent: bool
    state: str
    stalled: bool


@dataclass(frozen=True)
class Member(Message):
    """State of a member, and what it does."""

    by: str  # which process wrote it
    host: str
    state: Literal["waiting", "running", "stopping", "stopped", "preempted", "failed", "done"]
    address: str = ""  # that others reach the host at
    port: int = 0  # where the member answers
    master_port: int = 0  # where ranks meet, if it is the first
    probe: str = ""  # what it read where the controller wrote: proof of the same storage
    place: str = ""  # where the host stands in the network
    ranks: tuple[Sign, ...] = ()
    failed: tuple[End, ...] = ()
    free: int | None = None  # bytes, where checkpoints go
    oom_kills: int = 0  # since it began
    kernel: tuple[str, ...] = ()  # lines of the kernel's log, since it began
    reason: str = ""  # why it stops
    told: bool = False  # it was told to end by whoever started it
    over: bool = False  # none of its ranks is left


@dataclass(frozen=True)
class Standing(Message):
    """Answer of a gang's process to whoever connects."""

    gang: str
    attempt: int
    state: str  # of the Word that it knows


@dataclass(frozen=True)
class Peers:
    """Address and port by member, written as one JSON object."""

    at: dict[str, Address]

    def to_json(self) -> bytes:
        return json.dumps(self.at, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        return cls(_read(data, dict[str, Address], cls, where))


def by(data: bytes) -> str | None:
    """Name of the process that wrote a message, of whatever kind and version."""
    content = json.loads(data)
    return content.get("by") if isinstance(content, dict) else None


def _read(data: bytes, kind: Any, message: type, where: str) -> Any:
    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise Foreign(
            f"{where}: not a {message.__name__} as this version of the project writes it ({reason}); "
            "the flow and all hosts of a gang must run the same version"
        ) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind) if isinstance(kind, type) and is_dataclass(kind) else TypeAdapter(kind, config=STRICT)
