"""Sockets on which a command listens, from its start to its end, with all of its processes."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator

import psutil

LOOPBACK = ("127.", "::1", "::ffff:127.")
EVERY = 0.05  # seconds between looks; the sockets of a command stay open for seconds


class Listening:
    """Addresses on which a process and its descendants listen, with the command line of each listener."""

    def __init__(self, pid: int):
        self.root = psutil.Process(pid)
        self.at: dict[tuple[str, int], str] = {}

    def look(self) -> None:
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            processes = [self.root, *self.root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.at[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline())

    def exposed(self) -> dict[tuple[str, int], str]:
        """Those that another host can connect to."""
        return {address: line for address, line in self.at.items() if not address[0].startswith(LOOPBACK)}


@contextlib.contextmanager
def listening(process: subprocess.Popen) -> Iterator[Listening]:
    """Look again and again until the block ends."""
    seen, over = Listening(process.pid), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            seen.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
