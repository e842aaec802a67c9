"""Probe by which a member tells a store that is away from being cut off: each process of a gang answers on a port.

A connection gets one line of JSON that says who the process is. Nothing is read from it, so nothing can be asked for,
and nothing secret is said. Where the store does not answer, a member goes on while a witness does. The witness is the
controller, if it was ever reached from here, as it alone knows of a later attempt; else up to three other members.

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
    """Answer of the other end; None where nobody answers, or nobody of this version."""
    try:
        with socket.create_connection((address, port), timeout=PATIENCE) as connection:
            said = b""
            while block := connection.recv(4096):
                said += block
            return Standing.from_json(said, f"{address}:{port}")
    except (OSError, ValueError):
        return None


def addresses() -> list[str]:
    """Addresses of this host. Those that only it can reach come last."""
    found = [a.address for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reached(theirs: Iterable[str], port: int) -> tuple[str, str] | None:
    """The first of their addresses that answers, and the address of ours that they see then."""
    for address in theirs:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=PATIENCE) as connection:
            return address, connection.getsockname()[0]
    return None


def interface(address: str) -> str | None:
    """The network interface that has this address."""
    items = psutil.net_if_addrs().items()
    return next((name for name, of in items if any(one.address == address for one in of)), None)


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
