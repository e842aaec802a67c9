"""Sockets on which commands listen, from their start to their end, with every process that they start."""

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator

import psutil

LOOPBACK = ("127.", "::1", "::ffff:127.")
EVERY = 0.1  # seconds between looks; the sockets of a command stay open for seconds
MARK = "LISTENING_TEST"  # in the environment of all that is looked at


class Listening:
    """Addresses on which processes with a mark in their environment listen, and their command lines."""

    def __init__(self, mark: str):
        self.environment = os.environ | {MARK: mark}
        self.at: dict[tuple[str, int], str] = {}

    def look(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.environment[MARK]:
                    self.at |= listeners(process)

    def exposed(self) -> dict[tuple[str, int], str]:
        return {address: line for address, line in self.at.items() if is_exposed(address)}


def listeners(process: psutil.Process) -> dict[tuple[str, int], str]:
    """Addresses on which a process listens, with its command line."""
    sockets = process.net_connections("tcp")
    addresses = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    return {(one.ip, one.port): " ".join(process.cmdline()) for one in addresses}


def is_exposed(address: tuple[str, int]) -> bool:
    """Whether another host can connect."""
    return not address[0].startswith(LOOPBACK)


@contextlib.contextmanager
def listening() -> Iterator[Listening]:
    """Look again and again until the block ends, at processes that are started with its environment."""
    seen, over = Listening(uuid.uuid4().hex), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            seen.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
        seen.look()
    finally:
        over.set()
        thread.join()
