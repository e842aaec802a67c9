"""What tells a store that is away from a host that is cut off: a port of each process of a gang that says who it is.

Whoever connects gets one line of JSON, and is not listened to: nothing can be asked for, and nothing secret is said.
Where the store does not answer, a member goes on while a witness does: the controller, if it was ever reached from
here, as it alone knows of a later attempt; else up to three other members.

Also which address of this host others reach. Not covered: IPv6.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil

PATIENCE = 2.0  # seconds for an answer


def serve(word: Callable[[], dict[str, Any]]) -> int:
    """Answers with word() for as long as this process lives; the port."""
    server = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=_answer, args=(server, word), daemon=True, name="witness").start()
    return server.getsockname()[1]


def ask(address: str, port: int) -> dict[str, Any] | None:
    """What the other end says; None where nobody answers."""
    try:
        with socket.create_connection((address, port), timeout=PATIENCE) as connection:
            said = b""
            while block := connection.recv(4096):
                said += block
            return json.loads(said)
    except (OSError, ValueError):
        return None


def addresses() -> list[str]:
    """Of this host, those that only it can reach last."""
    found = [a.address for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reached(theirs: list[str], port: int) -> tuple[str, str] | None:
    """Which of their addresses answers, and which of ours they see then."""
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


def _answer(server: socket.socket, word: Callable[[], dict[str, Any]]) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                connection.sendall(json.dumps(word()).encode())
