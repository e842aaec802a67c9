"""Prefect artifacts that change while a task runs: single values, and pages that a background thread updates.

with LivePage("training-tiny", lambda: (text, description)):
    ...
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

EVERY = 10.0  # seconds between updates
SHARE = 20  # seconds until the next update, for each second of CPU time of an update
LONGEST = 60.0  # maximum seconds between updates
LAST_WORDS = 5.0  # seconds that the end of the stage waits for the last update

Page = tuple[str, str]  # Markdown, and a line for lists of pages


class TaskArtifact:
    """An artifact of the current task. The first send() creates it, later calls change it.

    Prefect is imported at use, as most importers of this module do not need it.
    """

    def __init__(self, key: str, kind: str):
        from prefect.context import TaskRunContext

        context = TaskRunContext.get()
        self._task_run: Any = context.task_run if context else None
        self._key, self._kind = key, kind
        self.has_task, self.is_sent = self._task_run is not None, False

    def send(self, data: str | float, description: str) -> None:
        """Show the data, with the description in lists of artifacts. Without a task, do nothing."""
        if not self.has_task:
            return
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with get_client(sync_client=True) as client:
            if self.is_sent:
                # update_artifact() would also emit an event, which --watch prints as a line with a bare UUID.
                update = ArtifactUpdate(data=data, description=description).model_dump(mode="json", exclude_unset=True)
                client.request("PATCH", "/artifacts/{id}", json=update, path_params={"id": self._id})
                return
            new = ArtifactCreate(
                key=self._key,
                type=self._kind,
                description=description,
                data=data,
                task_run_id=self._task_run.id,
                flow_run_id=self._task_run.flow_run_id,
            )
            self._id, self.is_sent = client.create_artifact(new).id, True


class LivePage(AbstractContextManager):
    """A page of the current task; without a task, no page. make() returns None if nothing has changed.

    An outage of the server does not block the task.
    """

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
