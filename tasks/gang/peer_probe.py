"""Probe with which a member distinguishes an outage of the store from a broken network of this host.

Each process of a gang answers on a port. A connection gets one line of JSON with the process's gang, attempt and state.
Nothing is read from the connection, and the answer contains no secret. If the store does not answer, a member continues
while a witness answers. The witness is the controller, if it was ever reached from this host, because only it knows of
a later attempt; otherwise up to three other members.

The module also finds the address of this host that others reach. Not covered: IPv6.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

import psutil

from tasks.gang.messages import Standing

PATIENCE = 2.0  # seconds for an answer


def serve(standing: Callable[[], Standing]) -> int:
    """Answer with standing() for as long as this process lives. Returns the port."""
    server = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=_answer, args=(server, standing), daemon=True, name="witness").start()
    return server.getsockname()[1]


def ask(address: str, port: int) -> Standing | None:
    """Answer of the other end; None if nothing answers, or another version does."""
    try:
        with socket.create_connection((address, port), timeout=PATIENCE) as connection:
            answer = b""
            while block := connection.recv(4096):
                answer += block
            return Standing.from_json(answer, f"{address}:{port}")
    except (OSError, ValueError):
        return None


def addresses() -> list[str]:
    """Addresses of this host, loopback addresses last."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    ours = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return sorted(dict.fromkeys(ours), key=lambda address: address.startswith("127."))


def reached(theirs: Iterable[str], port: int) -> tuple[str, str] | None:
    """The first of their addresses that answers, and this host's address in that connection."""
    for address in theirs:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=PATIENCE) as connection:
            return address, connection.getsockname()[0]
    return None


def interface(address: str) -> str | None:
    """The network interface that has this address."""
    items = psutil.net_if_addrs().items()
    return next((name for name, entries in items if any(entry.address == address for entry in entries)), None)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _answer(server: socket.socket, standing: Callable[[], Standing]) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                connection.sendall(standing().to_json())
