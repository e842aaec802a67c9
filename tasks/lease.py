"""Who is working on an artifact: a small object in the store that its holder renews and that dies with its holder.

No clock is compared with another host's: a waiter takes a lease over when it has itself seen it unchanged for EXPIRES
seconds, or at once where the holder was a process of this host that is gone. Every change is conditional on the
object's tag, so of two that reach for a lease one gets it.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.store import Store

RENEWED = 5.0  # seconds between renewals
EXPIRES = 30.0  # unchanged for so long, a lease is dead: six renewals missed
POLLED = 1.0


class Lost(RuntimeError):
    """The lease was taken over by somebody else: this process was silent for too long."""


class Lease:
    def __init__(self, store: Store, key: str, tag: str, content: dict):
        self.store, self.key, self._tag, self._content = store, key, tag, content
        self.lost = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"lease {key}")
        self._thread.start()

    def confirm(self) -> None:
        """Raises unless the lease is still held."""
        if self.lost.is_set():
            raise Lost(f"{self.store.link(self.key)}: taken over by another flow; this one was silent for {EXPIRES} s")

    def release(self) -> None:
        self._done.set()
        self._thread.join()
        if not self.lost.is_set():
            self.store.remove(self.key, self._tag)

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._done.wait(RENEWED):
            self._content["beat"] += 1
            try:
                tag = self.store.replace(self.key, _encode(self._content), self._tag)
            except Exception:  # the store cannot be reached: it may come back before the lease is over
                if time.monotonic() - renewed > EXPIRES:
                    self.lost.set()
                    return
                continue
            if tag is None and not self._is_mine():
                self.lost.set()
                return
            self._tag, renewed = tag or self._tag, time.monotonic()

    def _is_mine(self) -> bool:
        """A renewal whose answer got lost has changed the tag all the same."""
        found = self.store.read(self.key)
        if found and json.loads(found[0])["id"] == self._content["id"]:
            self._tag = found[1]
            return True
        return False


@contextmanager
def hold(store: Store, key: str, waiting: Callable[[str], None], about: str = "") -> Iterator[Lease]:
    """Waits until the lease is free or dead, and holds it. waiting(text) is told once whom it waits for."""
    content = {"id": secrets.token_hex(8), "beat": 0, "about": about} | _myself()
    lease = Lease(store, key, _take(store, key, content, waiting), content)
    try:
        yield lease
    finally:
        lease.release()


def holder(store: Store, key: str) -> str | None:
    """Who holds the lease, for people; None where nobody does, or a dead process of this host."""
    found = store.read(key)
    if found is None or _is_gone(json.loads(found[0])):
        return None
    return _name(json.loads(found[0]))


def _take(store: Store, key: str, content: dict, waiting: Callable[[str], None]) -> str:
    seen, since, told = None, time.monotonic(), None
    while True:
        if tag := store.create(key, _encode(content)):
            return tag
        found = store.read(key)
        if found is None:
            continue  # released this moment
        other, tag = json.loads(found[0]), found[1]
        if tag != seen:
            seen, since = tag, time.monotonic()
        if _is_gone(other) or time.monotonic() - since > EXPIRES:
            waiting(f"takes over from {_name(other)}, which is gone")
            if mine := store.replace(key, _encode(content), tag):
                return mine
            continue
        if told != other["id"]:
            told = other["id"]
            waiting(f"waits for {_name(other)}, which makes the same")
        time.sleep(POLLED)


def _myself() -> dict:
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "started": _started(os.getpid())}


def _boot() -> str:
    """Of this start of this machine; containers that share it are told apart by their process namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _is_gone(other: dict) -> bool:
    return other["boot"] == _boot() and _started(other["pid"]) != other["started"]


def _name(content: dict) -> str:
    return f"{content['about'] or 'a process'} (process {content['pid']} on {content['host']})"


def _encode(content: dict) -> bytes:
    return json.dumps(content).encode()
