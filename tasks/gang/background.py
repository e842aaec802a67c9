"""Background threads for the controller's reports to other services: a server that hangs does not block the controller.

    with aside(say, tick) as (say, tick): ...       both return at once

Lines keep their order. All are delivered before the block ends, unless the receiver needs more than DELIVERY_TIME
seconds. Late ticks are merged into one, and a last tick runs at the end. Lines and ticks do not wait for each other.
"""

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator

DELIVERY_TIME = 3.0  # a cancelled flow run has 30 s, and a checkpoint may take most of them


@contextlib.contextmanager
def aside(
    say: Callable[[str], None], tick: Callable[[], None]
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    due, over = threading.Event(), threading.Event()

    def send_lines() -> None:
        while (line := lines.get()) is not None:
            with contextlib.suppress(Exception):  # a lost line must not end the gang
                say(line)

    def send_ticks() -> None:
        last = False
        while not last:
            due.wait()
            due.clear()
            last = over.is_set()
            with contextlib.suppress(Exception):  # nor must a progress bar
                tick()

    threads = [_started(work) for work in (send_lines, send_ticks)]
    try:
        yield lines.put, due.set
    finally:
        lines.put(None)
        over.set()
        due.set()
        until = time.monotonic() + DELIVERY_TIME
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _started(work: Callable[[], None]) -> threading.Thread:
    context = contextvars.copy_context()  # tells Prefect which run the lines belong to
    thread = threading.Thread(target=context.run, args=(work,), daemon=True, name=f"aside: {work.__name__}")
    thread.start()
    return thread
