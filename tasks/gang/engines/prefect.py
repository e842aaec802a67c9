"""Engine for workers of a Prefect work pool. A member is a run of the deployment node/<gang.pool> (flows/node.py).

It is for permanent hosts without a scheduler. Each runs one worker with its name (`prefect worker start --pool
finetune-nodes --limit 1 --name HOST`) and nothing else. Prefect has no gangs, so this engine counts free workers before
it creates runs, gangs take turns with a lock in the store, and runs that did not start in time are cancelled.

A host has its worker's name. Any worker may take any run. The worker of an excluded host passes the run on, and waits
until another worker has taken it (flows/node.py). If there are too few other hosts, it keeps the run.

A worker counts as alive while its heartbeats arrive at its promised interval, by the server's clock. With a shorter
PREFECT_WORKER_HEARTBEAT_SECONDS (30) a lost worker is noticed earlier. Not covered: workers with a limit above 1.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.objects import State as RunState
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling

from contract.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import Demand, command, grace, spared
from tasks.gang.engines.client import Polled, State

PASSED_ON = "passed on to {}"  # last message of a run on an excluded host
BUSY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
MISSED = 2.0  # heartbeats that may be missing, plus some seconds for the server to record one
LEAVE_WITHIN = 10.0
PAGE = 200  # flow runs


class Runs(Polled):
    """Flow runs of one attempt."""

    def __init__(self, gang: str, ids: list[UUID]):
        self.gang, self.ids = gang, ids
        super().__init__(len(ids), self._look)

    def cancel(self) -> None:
        """Cancel all runs that have not ended. A run whose host is lost is marked as cancelled."""
        self.stop_polling()
        with contextlib.suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            _end(client, [*self.ids, *_left(client, self.gang)])

    def _look(self) -> State | None:
        ids = [*self.ids]
        alive: dict[int, bool | None] = dict.fromkeys(range(len(ids)))
        try:
            with get_client(sync_client=True) as client:
                states = _states(client, ids)
        except Exception:  # the server does not answer
            return None
        for node, id in enumerate(ids):
            state = states.get(id)
            if state and (other := re.fullmatch(PASSED_ON.format("(.*)"), state.message or "")):
                self.ids[node] = UUID(other[1])
            elif id in states:
                alive[node] = not (state and state.is_final())
        return State(alive)


def turn(demand: Demand) -> str | None:
    return demand.gang.pool


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    pool, n = demand.gang.pool, demand.nodes
    try:
        with get_client(sync_client=True) as client:
            without = _out(client, pool, n, without)
            free = _free(client, pool, without)
    except ObjectNotFound:
        raise Fault(f"gang.pool: {pool}: no such work pool; prefect work-pool create {pool} --type process") from None
    except httpx.HTTPError as error:
        return f"the Prefect server does not answer ({type(error).__name__})"
    if free >= n:
        return None
    others = f", without {', '.join(without)}" if without else ""
    return f"{n} of pool {pool}, where {free} worker{' is' if free == 1 else 's are'} free{others}"


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    with contextlib.suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        return len(_alive(client, demand.gang.pool) - {*without})
    return None


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Runs:
    pool = demand.gang.pool
    with get_client(sync_client=True) as client:
        _end(client, _left(client, board.gang))  # runs of an earlier controller that has died
        without = _out(client, pool, demand.nodes, without)
    ids: list[UUID] = []
    try:
        for node in range(n):
            ids.append(_member(demand, board, node, without))
    except ObjectNotFound:
        raise Fault(f"gang.pool: no deployment node/{pool}; prefect deploy --name {pool}") from None
    except BaseException:
        Runs(board.gang, ids).cancel()
        raise
    return Runs(board.gang, ids)


def another(
    demand: Demand, board: Board, runs: Runs, without: tuple[str, ...] = (), lost: set[int] | None = None
) -> int | None:
    """Start one more member if a worker is free. Runs of lost members are cancelled first: they count as busy."""
    pool, ids = demand.gang.pool, [*runs.ids]
    with get_client(sync_client=True) as client:
        _end(client, [ids[k] for k in lost or ()])
        without = _out(client, pool, demand.nodes, without)
        if not _free(client, pool, without):
            return None
    runs.ids.append(_member(demand, board, len(ids), without))
    return len(ids)


def _member(demand: Demand, board: Board, node: int, without: tuple[str, ...]) -> UUID:
    flow_run = run_deployment(
        f"node/{demand.gang.pool}",
        parameters={"arguments": command(board, str(node)), "without": [*without], "grace": grace(demand.gang)},
        flow_run_name=f"{board.gang}-{board.attempt}-{node}",
        tags=[f"gang:{board.gang}"],
        timeout=0,
        as_subflow=True,
    )
    return flow_run.id  # type: ignore[union-attr]


def _out(client: SyncPrefectClient, pool: str, nodes: int, without: tuple[str, ...]) -> tuple[str, ...]:
    """Hosts to exclude. If there are too few others, a host that failed may have recovered, and retries are limited."""
    alive = _alive(client, pool)
    return spared(without, lambda out: len(alive - {*out}) >= nodes)


def _in_states(states: list[StateType]) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=states))


def _free(client: SyncPrefectClient, pool: str, without: tuple[str, ...]) -> int:
    alive = _alive(client, pool)
    selected: Any = {
        "flow_run_filter": filters.FlowRunFilter(state=_in_states(BUSY)),
        "work_pool_filter": filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool])),
    }
    busy = client.count_flow_runs(**selected)
    if alive & {*without}:
        busy -= sum(run.labels.get("prefect.worker.name") in without for run in _runs(client, **selected))
    return max(0, len(alive - {*without}) - busy)


def _alive(client: SyncPrefectClient, pool: str) -> set[str]:
    """Names of the workers that are alive."""
    now, alive = _server_time(client), set()
    client.read_work_pool(pool)  # raises ObjectNotFound without one
    for worker in client.read_workers_for_work_pool(pool):
        beat, promised = worker.last_heartbeat_time, worker.heartbeat_interval_seconds or 30
        if beat and (now - beat).total_seconds() < MISSED * promised + 3:
            alive.add(worker.name)
    return alive


def _left(client: SyncPrefectClient, gang: str) -> list[UUID]:
    """Runs of this gang that have not ended, including runs that another run has passed on."""
    states = _in_states([*BUSY, StateType.SCHEDULED])
    of_gang = filters.FlowRunFilter(tags=filters.FlowRunFilterTags(all_=[f"gang:{gang}"]), state=states)
    return [run.id for run in _runs(client, flow_run_filter=of_gang)]


def _states(client: SyncPrefectClient, ids: list[UUID]) -> dict[UUID, RunState | None]:
    with_ids = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=ids))
    return {run.id: run.state for run in _runs(client, flow_run_filter=with_ids)}


def _runs(client: SyncPrefectClient, **selected: Any) -> Iterator[FlowRun]:
    """Read all flow runs; the server returns 200 at a time."""
    page: list[FlowRun] | None = None
    offset = 0
    while page is None or len(page) == PAGE:
        page = client.read_flow_runs(limit=PAGE, offset=offset, sort=FlowRunSort.ID_DESC, **selected)
        offset += len(page)
        yield from page


def _server_time(client: SyncPrefectClient) -> datetime:
    date = client._client.get("/health").headers.get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def _end(client: SyncPrefectClient, ids: list[UUID]) -> None:
    until, left = time.monotonic() + LEAVE_WITHIN, list(ids)
    while left:
        states = _states(client, left)
        left = [id for id, state in states.items() if not (state and state.is_final())]
        waiting = [id for id in left if (state := states[id]) and state.is_scheduled()]
        late = time.monotonic() > until
        for id in left if late else waiting:
            client.set_flow_run_state(id, Cancelled(message="its gang is over"), force=True)
        if late:
            return
        if not waiting:
            for id in left:
                if (state := states[id]) and not state.is_cancelling() and time.monotonic() > until - LEAVE_WITHIN / 2:
                    client.set_flow_run_state(id, Cancelling(message="its gang is over"))
            time.sleep(0.5 if left else 0)
