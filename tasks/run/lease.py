"""Lease on the work on an artifact: a small object in the store that its holder renews, and that otherwise expires.

Clocks of different hosts are never compared. A waiting process takes over a lease that it has seen unchanged for
EXPIRES seconds, or at once if the holder was a process of this host and has ended. Every change is conditional on the
object's tag: if two processes try at the same time, one gets the lease.
"""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from contract import ownership
from contract.faults import Stopped
from tasks.store import Store

RENEWED = 5.0  # seconds between renewals
EXPIRES = 30.0  # seconds without a change after which a lease is dead: six missed renewals
POLLED = 1.0


class Lost(RuntimeError):
    """Another process has taken over the lease, because this process did not renew it in time."""


class Lease:
    def __init__(self, store: Store, key: str, tag: str, content: dict):
        self.store, self.key, self._tag, self._content = store, key, tag, content
        # Another process may have the lease, because this process did not renew it in time.
        self.lost = threading.Event()
        self.taken = threading.Event()  # another process has it
        self._done, self._turn = threading.Event(), threading.Lock()
        self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"lease {key}")
        self._thread.start()

    def confirm(self) -> None:
        """Raise Lost if the lease is lost. If the last renewal is old, renew the lease first."""
        if not self.taken.is_set() and time.monotonic() - self._renewed > EXPIRES / 2:
            try:
                self._beat()
            except Exception:
                if not self.lost.is_set():
                    raise
        if self.lost.is_set():
            raise Lost(f"{self.store.link(self.key)}: taken over by another flow after {EXPIRES} s without a renewal")

    def release(self) -> None:
        self._done.set()
        self._thread.join()
        if not self.lost.is_set():
            with contextlib.suppress(Exception):  # without the store, the lease expires
                self.store.remove(self.key, self._tag)

    def _renew(self) -> None:
        while not self._done.wait(RENEWED) and not self.taken.is_set():
            try:
                self._beat()
            except Exception:  # the store does not answer; it may answer before the lease expires
                if time.monotonic() - self._renewed > EXPIRES:
                    self.lost.set()

    def _beat(self) -> None:
        with self._turn:
            self._content["beat"] += 1
            began = time.monotonic()  # other processes measure from the change, which is later
            tag = self.store.replace(self.key, _encode(self._content), self._tag)
            if tag is None:  # perhaps an earlier renewal succeeded and only its answer was lost
                entry = self.store.read(self.key)
                if entry is None or ownership.decode(entry[0]).get("id") != self._content["id"]:
                    self.taken.set()
                    self.lost.set()
                    return
                tag = entry[1]
            self._tag, self._renewed = tag, began
            self.lost.clear()  # an outage of the store affects the other processes too


@contextlib.contextmanager
def hold(
    store: Store, key: str, waiting: Callable[[str], None], about: str = "", stop: Callable[[], bool] = lambda: False
) -> Iterator[Lease]:
    """Wait until the lease is free or dead, and hold it. waiting(text) is called once per holder, with its name."""
    content = {"id": secrets.token_hex(8), "beat": 0, "about": about} | ownership.me()
    lease = Lease(store, key, _take(store, key, content, waiting, stop), content)
    try:
        yield lease
    finally:
        lease.release()


def holder(store: Store, key: str) -> str | None:
    """Return a description of the lease's holder; None without a holder, or if it is a dead process of this host."""
    entry = store.read(key)
    other = ownership.decode(entry[0]) if entry else {}
    return ownership.name(other) if other and not ownership.ended(other) else None


def _take(store: Store, key: str, content: dict, waiting: Callable[[str], None], stop: Callable[[], bool]) -> str:
    seen, since, reported = None, time.monotonic(), None
    while not stop():
        if tag := store.create(key, _encode(content)):
            return tag
        entry = store.read(key)
        if entry is None:
            continue  # it was just released
        other, tag = ownership.decode(entry[0]), entry[1]
        if tag != seen:
            seen, since = tag, time.monotonic()
        if ownership.ended(other) or time.monotonic() - since > EXPIRES:
            waiting(f"takes over from {ownership.name(other)}, which has died")
            if mine := store.replace(key, _encode(content), tag):
                return mine
            continue
        if reported != other.get("id", ""):
            reported = other.get("id", "")
            waiting(f"waits for {ownership.name(other)}, which makes this artifact")
        time.sleep(POLLED)
    raise Stopped(f"{key}: stopped while another process was making it")


def _encode(content: dict) -> bytes:
    return json.dumps(content).encode()
