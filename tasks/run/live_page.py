"""A page in Prefect that is renewed while a stage works.

    with LivePage("training-tiny", lambda: (text, description)):
        ...

A thread of its own makes the text and sends it. A server that is away delays nobody.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from tasks.run.task_artifact import TaskArtifact

EVERY = 10.0  # seconds between looks
SHARE = 20  # a text that takes a second of CPU time to make is made once in so many
LONGEST = 60.0  # seconds between looks, whatever it takes
LAST_WORDS = 5.0  # seconds that the end of the stage waits for the last text

Page = tuple[str, str]  # Markdown, and a line that stands for it in lists


class LivePage(AbstractContextManager):
    """A page of the task that runs when this is made; none beside a task. The text is None while there is no news."""

    def __init__(self, key: str, make: Callable[[], Page | None]):
        self._artifact, self._make = TaskArtifact(key, "markdown"), make
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"page {key}", daemon=True)

    def __enter__(self) -> Self:
        if self._artifact.has_task:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._artifact.has_task:
            self._thread.join(LAST_WORDS)

    def _renew(self) -> None:
        pause, closing = EVERY, False
        while not closing:
            closing = self._closing.wait(pause)
            began = time.thread_time()
            with contextlib.suppress(Exception):  # a page is not worth a stage
                if page := self._make():
                    self._artifact.send(*page)
            pause = min(LONGEST, max(EVERY, SHARE * (time.thread_time() - began)))
