"""An artifact in Prefect that changes while a task runs."""

from typing import Any


class TaskArtifact:
    """An artifact of the current task. The first send() creates it, later calls change it.

    Prefect is imported at use, as most importers of this module do not need it.
    """

    def __init__(self, key: str, kind: str):
        from prefect.context import TaskRunContext

        context = TaskRunContext.get()
        self._task_run: Any = context.task_run if context else None
        self._key, self._kind, self._id = key, kind, None

    @property
    def has_task(self) -> bool:
        return self._task_run is not None

    @property
    def is_sent(self) -> bool:
        return self._id is not None

    def send(self, data: str | float, description: str) -> None:
        """Show the data, and the description in lists of artifacts. Without a task nothing happens."""
        if self._task_run is None:
            return
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with get_client(sync_client=True) as client:
            if self._id is not None:
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
            self._id = client.create_artifact(new).id
