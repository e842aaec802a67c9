"""Engines on hosts of their own: they come to the trainer, and are asked as one beside it is.

    Meeting(run).engines()      all of them, once they have come: the trainer's side
    come(run)                   a connection to the trainer: the engine's side

The trainer writes where it listens, and a key that is made for this attempt of the gang, into a file that only its user
can read, on the storage that all hosts share. Who does not know the key is not listened to. A host that is gone says
nothing: its silence ends the connection after gang.silent_after seconds.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from conf.rules.reinforcement import engines
from conf.schema.run import Run
from contract.faults import Fault
from contract.files import write_atomically
from trainer.reinforcement.engines.engine import Engine

PLACE = "rollouts-meet.json"
WITHIN = 600.0  # seconds until all have come: hosts start at once, but imports from a cold disk take minutes
LOOKED = 0.5  # seconds between looks at what is waited for
ANSWERED = 10  # seconds for a proof of the key
BETWEEN = 2  # seconds between questions to a host that says nothing


@dataclass(frozen=True)
class Place:
    """Address at which the trainer of an attempt listens, and the key to it."""

    attempt: str
    address: str
    port: int
    key: str


@dataclass(frozen=True)
class Guest:
    """An engine, by its own account."""

    host: str
    number: int  # on that host
    log: str


class FarEngine(Engine):
    """vLLM on another host. Its gang has started it, and ends it."""

    def __init__(self, guest: Guest, connection: Connection, address: str, patience: float):
        super().__init__(f"engine {guest.number} on {guest.host}", Path(guest.log), connection)
        self.host, self.address, self.patience = guest.host, address, patience
        self._gone = threading.Event()
        # A descriptor of its own: another file may get the number of one that is closed.
        self._watched = socket.socket(fileno=os.dup(connection.fileno()))
        threading.Thread(target=self._watch, name=f"connection to {guest.host}", daemon=True).start()

    def wait(self) -> None:
        self._gone.wait()

    def is_gone(self) -> bool:
        return self._gone.is_set()

    def end(self) -> str:
        return f"vLLM on {self.host} has ended, or its host no longer answers ({self.log})"

    def _watch(self) -> None:
        with self._watched:
            looked = select.poll()
            looked.register(self._watched, select.POLLRDHUP)
            looked.poll()
        self._gone.set()


class Meeting:
    """The trainer's side: it listens from the moment it is made."""

    def __init__(self, run: Run):
        attempt, address = os.environ.get("GANG_ATTEMPT"), os.environ.get("GANG_ADDRESS")
        if not attempt or not address:
            raise Fault(
                f"reinforce.hosts: {run.reinforce.hosts}, and only a gang has other hosts: python -m flows.finetune "
                "starts one; 0 has vLLM here"
            )
        self.run, self.file = run, Path(run.paths.logs) / PLACE
        self.socket = socket.create_server((address, 0), backlog=64)
        self.socket.settimeout(LOOKED)
        self.place = Place(attempt, address, self.socket.getsockname()[1], secrets.token_hex(32))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.unlink(missing_ok=True)
        self.file.touch(0o600)
        write_atomically(self.file, json.dumps(asdict(self.place)), durable=False)
        self.come: dict[tuple[str, int], FarEngine] = {}
        self.changed, self.over = threading.Condition(), threading.Event()
        # vLLM loads the model as soon as it has come, while Megatron does.
        self.thread = threading.Thread(target=self._listen, name="meeting", daemon=True)
        self.thread.start()

    def engines(self) -> list[FarEngine]:
        """All engines, in the order of hosts. Raises a RuntimeError where they do not come in time."""
        wanted = engines(self.run)
        with self.changed:
            self.changed.wait_for(lambda: len(self.come) == wanted, WITHIN)
        self.close()
        if len(self.come) < wanted:
            raise RuntimeError(f"rollout: {len(self.come)} of {wanted} engines came within {WITHIN:.0f} s")
        return [self.come[key] for key in sorted(self.come)]

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.socket.close()
        self.file.unlink(missing_ok=True)

    def _listen(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError, OSError, EOFError, AuthenticationError, ValueError, TypeError):
                engine, number = self._received(self.socket.accept()[0])
                with self.changed:
                    self.come[engine.host, number] = engine
                    self.changed.notify_all()

    def _received(self, other: socket.socket) -> tuple[FarEngine, int]:
        """The engine at the other end, once it has proved that it knows the key, and this process has."""
        silent_after, key = self.run.gang.silent_after, self.place.key.encode()
        with other:
            _limit(other, ANSWERED)
            with Connection(os.dup(other.fileno())) as asked:
                deliver_challenge(asked, key)
                answer_challenge(asked, key)
                guest = Guest(**json.loads(asked.recv_bytes(1 << 12)))
            _limit(other, 0)
            _notice_silence(other, silent_after)
            connection = Connection(other.detach())
        return FarEngine(guest, connection, self.place.address, silent_after), guest.number


def come(run: Run, log: Path) -> socket.socket:
    """Come to the trainer of this attempt, whenever it listens, and say which engine this is."""
    until, name = time.monotonic() + WITHIN, os.environ.get("GANG_HOST") or socket.gethostname()
    guest = Guest(name, int(os.environ["LOCAL_RANK"]), str(log))
    while time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError, TypeError):
            place = Place(**json.loads((Path(run.paths.logs) / PLACE).read_text()))
            if place.attempt == os.environ["GANG_ATTEMPT"]:
                return _met(place, guest, run.gang.silent_after)
        time.sleep(LOOKED)
    raise RuntimeError(f"rollout: the trainer of {os.environ['GANG_ATTEMPT']} did not listen within {WITHIN:.0f} s")


def _met(place: Place, guest: Guest, silent_after: float) -> socket.socket:
    found = socket.create_connection((place.address, place.port), timeout=ANSWERED)
    found.settimeout(None)
    _limit(found, ANSWERED)
    with Connection(os.dup(found.fileno())) as asked:
        answer_challenge(asked, place.key.encode())
        deliver_challenge(asked, place.key.encode())
        asked.send_bytes(json.dumps(asdict(guest)).encode())
    _limit(found, 0)
    _notice_silence(found, silent_after)
    return found


def _limit(connection: socket.socket, seconds: int) -> None:
    """Have reads of the connection end after so many seconds; 0 = never."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _notice_silence(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end the connection where the other host says nothing, or takes nothing, for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, BETWEEN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
