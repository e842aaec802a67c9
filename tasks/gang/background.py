"""Background threads for the controller's reports to the outside, so that a server that hangs delays no watch.

    with aside(say, tick) as (say, tick): ...       both return at once

Lines come in their order, and all before the block ends, if the receiver takes them within TOLD_WITHIN seconds. Ticks
that are late are merged into one, and the last one comes at the end. Neither waits for the other.
"""

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator

TOLD_WITHIN = 3.0  # a cancelled flow run has 30 s, most of which a checkpoint may take


@contextlib.contextmanager
def aside(
    say: Callable[[str], None], tick: Callable[[], None]
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    due, over = threading.Event(), threading.Event()

    def pass_on() -> None:
        while (line := lines.get()) is not None:
            with contextlib.suppress(Exception):  # a line that gets lost is not worth a gang
                say(line)

    def go_on() -> None:
        last = False
        while not last:
            due.wait()
            due.clear()
            last = over.is_set()
            with contextlib.suppress(Exception):  # neither is a progress bar
                tick()

    threads = [_started(work) for work in (pass_on, go_on)]
    try:
        yield lines.put, due.set
    finally:
        lines.put(None)
        over.set()
        due.set()
        until = time.monotonic() + TOLD_WITHIN
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _started(work: Callable[[], None]) -> threading.Thread:
    context = contextvars.copy_context()  # Prefect knows by it whose lines they are
    thread = threading.Thread(target=context.run, args=(work,), daemon=True, name=f"aside: {work.__name__}")
    thread.start()
    return thread
