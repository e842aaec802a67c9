"""Engines on other hosts: they connect to the trainer, which then calls them like engines on its own host.

    Meeting(run).engines()      the trainer's side: waits for all engines
    connect(run, log)           the engine's side: a connection to the trainer

The trainer writes its address and port, and a new key for this attempt of the gang, to a file that only its user can
read, on the storage that all hosts share. Connections without the key are refused. If a host is lost, its silence ends
the connection after gang.silent_after seconds.
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
from collections.abc import Iterator
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
WITHIN = 600.0  # seconds for all engines to connect: hosts start together, but imports from a cold disk take minutes
LOOKED = 0.5  # seconds between two checks while waiting
ANSWERED = 10  # seconds for a proof of the key
BETWEEN = 2  # seconds between keepalive probes


@dataclass(frozen=True)
class Place:
    """Address of an attempt's trainer, and the key for connections to it."""

    attempt: str
    address: str
    port: int
    key: str


@dataclass(frozen=True)
class Guest:
    """Identity of an engine, which it sends when it connects."""

    host: str
    number: int  # on that host
    log: str


class FarEngine(Engine):
    """vLLM on another host. The gang starts and ends it."""

    def __init__(self, guest: Guest, connection: Connection, address: str, patience: float):
        super().__init__(f"engine {guest.number} on {guest.host}", Path(guest.log), connection)
        self.host, self.address, self.patience = guest.host, address, patience
        self._gone = threading.Event()
        # A separate descriptor: after a close, another file may get the same number.
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
            hang_up = select.poll()
            hang_up.register(self._watched, select.POLLRDHUP)
            hang_up.poll()
        self._gone.set()


class Meeting:
    """The trainer's side, which listens as soon as it is created."""

    def __init__(self, run: Run):
        attempt, address = os.environ.get("GANG_ATTEMPT"), os.environ.get("GANG_ADDRESS")
        if not attempt or not address:
            raise Fault(
                f"reinforce.hosts: {run.reinforce.hosts}, but only a gang has other hosts: python -m flows.finetune "
                "starts one; with 0, vLLM runs on this host"
            )
        self.run, self.file = run, Path(run.paths.logs) / PLACE
        self.socket = socket.create_server((address, 0), backlog=64)
        self.socket.settimeout(LOOKED)
        self.place = Place(attempt, address, self.socket.getsockname()[1], secrets.token_hex(32))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.unlink(missing_ok=True)
        self.file.touch(0o600)
        write_atomically(self.file, json.dumps(asdict(self.place)), durable=False)
        self.connected: dict[tuple[str, int], FarEngine] = {}
        self.changed, self.over = threading.Condition(), threading.Event()
        # A connected engine loads the model at once, at the same time as Megatron does.
        self.thread = threading.Thread(target=self._listen, name="meeting", daemon=True)
        self.thread.start()

    def engines(self) -> list[FarEngine]:
        """All engines, in the order of hosts. Raises a RuntimeError if they do not connect in time."""
        count = engines(self.run)
        with self.changed:
            self.changed.wait_for(lambda: len(self.connected) == count, WITHIN)
        self.close()
        if len(self.connected) < count:
            raise RuntimeError(f"rollout: {len(self.connected)} of {count} engines connected within {WITHIN:.0f} s")
        return [self.connected[key] for key in sorted(self.connected)]

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
                    self.connected[engine.host, number] = engine
                    self.changed.notify_all()

    def _received(self, other: socket.socket) -> tuple[FarEngine, int]:
        """Return the engine at the other end, after both ends have proved that they know the key."""
        silent_after, key = self.run.gang.silent_after, self.place.key.encode()
        with other:
            with _handshake(other, silent_after) as handshake:
                deliver_challenge(handshake, key)
                answer_challenge(handshake, key)
                guest = Guest(**json.loads(handshake.recv_bytes(1 << 12)))
            connection = Connection(other.detach())
        return FarEngine(guest, connection, self.place.address, silent_after), guest.number


def connect(run: Run, log: Path) -> socket.socket:
    """Connect to the trainer of this attempt as soon as it listens, and send this engine's identity."""
    until, name = time.monotonic() + WITHIN, os.environ.get("GANG_HOST") or socket.gethostname()
    guest = Guest(name, int(os.environ["LOCAL_RANK"]), str(log))
    while time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError, TypeError):
            place = Place(**json.loads((Path(run.paths.logs) / PLACE).read_text()))
            if place.attempt == os.environ["GANG_ATTEMPT"]:
                return _connected(place, guest, run.gang.silent_after)
        time.sleep(LOOKED)
    raise RuntimeError(f"rollout: the trainer of {os.environ['GANG_ATTEMPT']} did not listen within {WITHIN:.0f} s")


def _connected(place: Place, guest: Guest, silent_after: float) -> socket.socket:
    connection = socket.create_connection((place.address, place.port), timeout=ANSWERED)
    connection.settimeout(None)
    with _handshake(connection, silent_after) as handshake:
        answer_challenge(handshake, place.key.encode())
        deliver_challenge(handshake, place.key.encode())
        handshake.send_bytes(json.dumps(asdict(guest)).encode())
    return connection


@contextlib.contextmanager
def _handshake(connection: socket.socket, silent_after: float) -> Iterator[Connection]:
    """Yield a connection for the proof of the key. Within the context, each read has a time limit.

    After the context, the kernel ends the connection if the other host does not respond for `silent_after` seconds.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWERED, 0))
    with Connection(os.dup(connection.fileno())) as handshake:
        yield handshake
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, BETWEEN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_after * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
