"""Messages between a gang's controller and its members: a dataclass per message, JSON in between.

    Word        gang.json        the controller: gathering, go or stop
    Task        task.json        the controller: what the members of the attempt run
    Peers       peers.json       the controller: where each member answers
    Member      nodes/<k>.json   a member: what it is and does; with a Sign of each rank, or the End of each
    Standing    a port           the answer of any process when the store does not answer (peer_probe.py)

A field without a default is always written; one with a default is written if its value differs. Processes of a gang
read strictly: an unknown key, a missing key or a wrong type is a Fault, as only another version of this project writes
it. Readers of past attempts accept every version and use Board.read(): flows.logs, attempt.py.
"""

import functools
import json
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from contract.faults import Fault

Address = tuple[str, int]  # host and port
STRICT = ConfigDict(strict=True, extra="forbid")


class Message:
    """Base of all messages, with from_json() and to_json()."""

    __pydantic_config__ = STRICT

    def to_json(self) -> bytes:
        return _adapter(type(self)).dump_json(self, exclude_defaults=True)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Read a message. Raises Foreign, which names the place `where` it was read."""
        return _read(data, cls, cls, where)


class Foreign(Fault):
    """A message that another version of the project has written. An outage of the store raises other Faults."""


@dataclass(frozen=True)
class Word(Message):
    """Message of the controller. It is renewed every few seconds and expires otherwise."""

    by: str  # id of the process that wrote it
    state: Literal["gathering", "go", "stop"]
    beat: int = 0  # a renewal changes it
    probe: str = ""  # a file on the storage that all hosts share
    addresses: tuple[str, ...] = ()  # of the controller's host
    port: int = 0  # where it answers
    order: tuple[int, ...] = ()  # go: members, in the order of their ranks
    master: Address | None = None  # go: where ranks meet
    key: str = ""  # go: secret that admits hosts to the rendezvous
    apart: tuple[int, ...] = ()  # go: members that do not share the controller's folder
    runs: str = ""  # go: the controller's folder of local files, if members are apart
    start: bool = False  # after go, if members are apart: all hosts have their files
    copy: int = 0  # step of the checkpoint that members have to copy to the store
    copied: int = 0  # step of the newest complete checkpoint in the store
    reason: str = ""  # stop: why
    save: bool = False  # stop: save a checkpoint first
    stays: bool = False  # stop: members stay until the controller names the next attempt, or closes this one
    next: int = 0  # closed: the attempt that the members in `again` join
    again: tuple[int, ...] = ()
    closed: bool = False  # all members have ended, except those in `again`


@dataclass(frozen=True)
class Task(Message):
    """Task of the members: a command of the trainer, which each runs under torchrun."""

    command: str
    nodes: int  # members whose ranks run it together, the first in order
    gpus: int  # of each host; 0 = it computes on CPUs
    ranks: int  # that torchrun starts on each host
    helps: str = ""  # command of all further members: each runs it as a separate job that connects to the first member
    helpers: int = 0  # ranks of each further member


@dataclass(frozen=True)
class Sign(Message):
    """State of a rank, from its signs of life and its process."""

    rank: int
    pid: int
    step: int
    phase: str
    age: float  # seconds since its thread of life wrote
    idle: float  # seconds since its last step
    state: str  # of the process in /proc, such as T or D; empty without a process
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
    """State of a member and its ranks."""

    by: str  # id of the process that wrote it
    host: str
    state: Literal["waiting", "running", "stopping", "stopped", "preempted", "failed", "done"]
    address: str = ""  # at which others reach the host
    port: int = 0  # where the member answers
    master_port: int = 0  # where ranks meet, if it is the first
    probe: str = ""  # content of the controller's probe file: proof of the same storage
    place: str = ""  # the host's position in the network
    fetched: tuple[int, int] | None = None  # bytes, done and all, of files that this host lacks
    ready: bool = False  # this host has all files
    saved: int = 0  # the first member: step of the newest checkpoint that all ranks have written
    copied: int = 0  # step of the last requested checkpoint that it has copied or lacks
    ranks: tuple[Sign, ...] = ()
    failed: tuple[End, ...] = ()
    free: int | None = None  # bytes, where checkpoints go
    oom_kills: int = 0  # since it began
    kernel: tuple[str, ...] = ()  # lines of the kernel's log, since it began
    reason: str = ""  # why it stops
    told: bool = False  # a signal of its starter ended it
    over: bool = False  # all its ranks have ended


@dataclass(frozen=True)
class Standing(Message):
    """Answer of a gang's process to every connection."""

    gang: str
    attempt: int
    state: str  # of the Word that it knows


@dataclass(frozen=True)
class Peers(Message):
    """Address and port by member, written as one JSON object."""

    at: dict[str, Address]

    def to_json(self) -> bytes:
        return json.dumps(self.at, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        return cls(_read(data, dict[str, Address], cls, where))


def by(data: bytes) -> str | None:
    """Id of the process that wrote a message of any kind and version."""
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
