"""Lease on the work on an artifact: a small object in the store that its holder renews and that dies with its holder.

No clock is compared with another host's. A waiter takes a lease over when it has itself seen it unchanged for EXPIRES
seconds, or at once where the holder was a process of this host that is gone. Every change is conditional on the
object's tag, so that one process gets a lease that two reach for.
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
EXPIRES = 30.0  # unchanged for so long, a lease is dead: six renewals missed
POLLED = 1.0


class Lost(RuntimeError):
    """The lease was taken over by another process: this one was silent for too long."""


class Lease:
    def __init__(self, store: Store, key: str, tag: str, content: dict):
        self.store, self.key, self._tag, self._content = store, key, tag, content
        self.lost = threading.Event()  # it may be somebody else's by now: this process was silent for too long
        self.taken = threading.Event()  # it is somebody else's
        self._done, self._turn = threading.Event(), threading.Lock()
        self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"lease {key}")
        self._thread.start()

    def confirm(self) -> None:
        """Raise unless the lease is still held. Asks the store if this process may have been silent for too long."""
        if not self.taken.is_set() and time.monotonic() - self._renewed > EXPIRES / 2:
            try:
                self._beat()
            except Exception:
                if not self.lost.is_set():
                    raise
        if self.lost.is_set():
            raise Lost(f"{self.store.link(self.key)}: taken over by another flow; this one was silent for {EXPIRES} s")

    def release(self) -> None:
        self._done.set()
        self._thread.join()
        if not self.lost.is_set():
            with contextlib.suppress(Exception):  # the store cannot be reached: the lease ends by itself
                self.store.remove(self.key, self._tag)

    def _renew(self) -> None:
        while not self._done.wait(RENEWED) and not self.taken.is_set():
            try:
                self._beat()
            except Exception:  # the store cannot be reached: it may come back before the lease is over
                if time.monotonic() - self._renewed > EXPIRES:
                    self.lost.set()

    def _beat(self) -> None:
        with self._turn:
            self._content["beat"] += 1
            began = time.monotonic()  # others count from the change, which is later
            tag = self.store.replace(self.key, _encode(self._content), self._tag)
            if tag is None:  # a renewal whose answer got lost has changed the tag all the same
                found = self.store.read(self.key)
                if found is None or ownership.decode(found[0]).get("id") != self._content["id"]:
                    self.taken.set()
                    self.lost.set()
                    return
                tag = found[1]
            self._tag, self._renewed = tag, began
            self.lost.clear()  # where the store was away, it was so for others, too


@contextlib.contextmanager
def hold(
    store: Store,
    key: str,
    waiting: Callable[[str], None],
    about: str = "",
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Lease]:
    """Wait until the lease is free or dead, and hold it. waiting(text) is called once with the name of the holder."""
    content = {"id": secrets.token_hex(8), "beat": 0, "about": about} | ownership.me()
    lease = Lease(store, key, _take(store, key, content, waiting, stop), content)
    try:
        yield lease
    finally:
        lease.release()


def holder(store: Store, key: str) -> str | None:
    """The holder of the lease, as text for people; None where there is none, or a dead process of this host."""
    found = store.read(key)
    other = ownership.decode(found[0]) if found else {}
    return ownership.name(other) if other and not ownership.ended(other) else None


def _take(store: Store, key: str, content: dict, waiting: Callable[[str], None], stop: Callable[[], bool]) -> str:
    seen, since, told = None, time.monotonic(), None
    while not stop():
        if tag := store.create(key, _encode(content)):
            return tag
        found = store.read(key)
        if found is None:
            continue  # released this moment
        other, tag = ownership.decode(found[0]), found[1]
        if tag != seen:
            seen, since = tag, time.monotonic()
        if ownership.ended(other) or time.monotonic() - since > EXPIRES:
            waiting(f"takes over from {ownership.name(other)}, which is gone")
            if mine := store.replace(key, _encode(content), tag):
                return mine
            continue
        if told != other.get("id", ""):
            told = other.get("id", "")
            waiting(f"waits for {ownership.name(other)}, which makes the same")
        time.sleep(POLLED)
    raise Stopped(f"{key}: stopped while somebody else was making it")


def _encode(content: dict) -> bytes:
    return json.dumps(content).encode()
