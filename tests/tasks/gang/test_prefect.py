"""The Prefect engine's questions to a server, which is a toy here; tests/tasks/gang/test_hosts.py has a real one."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import FlowRun

from tasks.gang.engines import prefect


@dataclass
class Server:
    """Gives no more runs at once than it likes to."""

    runs: list[FlowRun]
    asked: list[tuple[int, int]] = field(default_factory=list)

    def read_flow_runs(self, *, limit: int, offset: int, **_: Any) -> list[FlowRun]:
        self.asked.append((limit, offset))
        return self.runs[offset : offset + min(limit, 200)]


def test_all_runs_of_a_large_gang_are_found():
    for count, questions in ((0, 1), (199, 1), (200, 2), (1000, 6)):
        server = Server([FlowRun(id=UUID(int=k), flow_id=UUID(int=0)) for k in range(count)])
        assert prefect._left(server, "gang") == [UUID(int=k) for k in range(count)]  # type: ignore[arg-type]
        assert len(server.asked) == questions
