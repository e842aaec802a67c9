"""A page in Prefect that is updated while a stage runs.

    with LivePage("training-tiny", lambda: (text, description)):
        ...

A background thread builds the text and sends it. An outage of the server does not block the stage.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from tasks.run.task_artifact import TaskArtifact

EVERY = 10.0  # seconds between updates
SHARE = 20  # for each second of CPU time of an update, seconds until the next one
LONGEST = 60.0  # maximum seconds between updates
LAST_WORDS = 5.0  # seconds that the end of the stage waits for the last text

Page = tuple[str, str]  # Markdown, and a line for lists of pages


class LivePage(AbstractContextManager):
    """A page of the current task; outside a task there is none. make() returns None if nothing has changed."""

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
            with contextlib.suppress(Exception):  # a failed page must not end the stage
                if page := self._make():
                    self._artifact.send(*page)
            pause = min(LONGEST, max(EVERY, SHARE * (time.thread_time() - began)))
