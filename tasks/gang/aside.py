"""What the controller tells the outside goes by a thread of its own: a server that hangs delays no watch.

    with aside(say, tick) as (say, tick): ...       both return at once

Lines come in their order, and all before the block ends, if whoever gets them takes them within TOLD_WITHIN seconds.
Ticks that are late are one.
"""

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator

TOLD_WITHIN = 3.0  # a cancelled flow run has 30 s, most of which a checkpoint may take


@contextlib.contextmanager
def aside(
    say: Callable[[str], None], tick: Callable[[], None]
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # an empty one is a tick, None the end
    due = threading.Event()

    def pass_on() -> None:
        while (line := lines.get()) is not None:
            with contextlib.suppress(Exception):  # a line or a progress bar that gets lost is not worth a gang
                if line:
                    say(line)
                else:
                    due.clear()
                    tick()

    def later() -> None:
        if not due.is_set():
            due.set()
            lines.put("")

    context = contextvars.copy_context()  # Prefect knows by it whose lines they are
    thread = threading.Thread(target=context.run, args=(pass_on,), daemon=True, name="aside")
    thread.start()
    try:
        yield (lambda line: lines.put(line or " ")), later
    finally:
        lines.put(None)
        thread.join(TOLD_WITHIN)
