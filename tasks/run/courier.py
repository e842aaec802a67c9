"""Threads that hand items to slow receivers, such as a server, so that the sender never waits.

    lines = Courier(say, "lines")                       every item, in order
    page = Courier(show, "page", most=1, again=5.0)     only the newest item, again until the receiver accepts it
    with closing(3.0, lines, page):
        lines.take("a line")

Without `again`, an item whose delivery fails is lost.
"""

import collections
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator


class Courier[T]:
    """Thread that calls `give` for each item; with `most`, only for that many of the newest items.

    If `give` raises an error, the call is repeated after `again` seconds, unless there is a newer item.
    """

    def __init__(self, give: Callable[[T], None], name: str, most: int | None = None, again: float | None = None):
        self._give, self._again = give, again
        self._items: collections.deque[T] = collections.deque(maxlen=most)
        self._turn, self._wake, self._ending = threading.Lock(), threading.Event(), threading.Event()
        context = contextvars.copy_context()  # tells Prefect which run the items belong to
        self._thread = threading.Thread(target=context.run, args=(self._deliver,), daemon=True, name=name)
        self._thread.start()

    def take(self, item: T) -> None:
        with self._turn:
            self._items.append(item)
        self._wake.set()

    def end(self) -> None:
        """End the thread after the last item."""
        self._ending.set()
        self._wake.set()

    def join(self, within: float) -> None:
        self._thread.join(within)

    def _deliver(self) -> None:
        while True:
            ending, failed = self._ending.is_set(), False
            while self._items and not failed:
                item = self._items.popleft()
                try:
                    self._give(item)
                except Exception:  # the receiver does not answer
                    failed = self._again is not None
                    with self._turn:
                        if failed and not self._items:
                            self._items.append(item)
            if ending and not self._items:
                return
            self._wake.wait(self._again if failed else None)
            self._wake.clear()


@contextlib.contextmanager
def closing(within: float, *couriers: Courier) -> Iterator[None]:
    """End the couriers after the block, and wait at most `within` seconds. They continue in the background."""
    try:
        yield
    finally:
        until = time.monotonic() + within
        for courier in couriers:
            courier.end()
        for courier in couriers:
            courier.join(max(0.0, until - time.monotonic()))
