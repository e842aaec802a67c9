"""Host of a gang, as a run of the deployment node/<pool>. tasks/gang/engines/prefect.py creates N such runs at once.

Nobody starts this flow by hand. Its child processes end with this process and with the worker above it, even if these
are killed. The name of a host is its worker's name. A host that the gang excludes passes the run on to another worker.
"""

import contextlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from uuid import UUID

import httpx
import psutil
from prefect import State, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from contract import closed_pipe
from contract.processes import started
from flows import secret_blocks
from flows.arguments import parser, refused
from tasks.gang.engines.prefect import PASSED_ON
from tasks.run import launch

POLLED = 1.0  # seconds


@flow(name="node", persist_result=False)
def node(arguments: list[str], without: list[str] | None = None, grace: int = 29) -> State:
    """Run this host's part of a gang.

    Args:
        arguments: Arguments of the member's command, after python -m.
        without: Hosts that are excluded.
        grace: Seconds that the member may take to end. Prefect's worker kills a run that it has cancelled after 30.
    """
    host = os.environ.get("PREFECT__WORKER_NAME") or socket.gethostname()
    if host in (without or ()):
        return _pass_on()
    starters = [f"--starter={pid}:{started(pid)}" for pid in _until_worker()]
    secret_blocks.use()
    keep = [name for name in os.environ if name.startswith("AWS_")]  # for the store; ranks do not get them
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        try:
            log = Path(folder) / "member.log"
            say, told = get_run_logger().info, {"GANG_HOST": host}
            launch.process([*arguments, *starters], log, say, lambda: False, keep=keep, changed=told, grace=grace)
        except launch.Broken as error:
            return Failed(message=str(error))
    return Completed(message="over")


def _pass_on() -> State:
    """Pass the run on, and wait until another worker has taken it: this worker would otherwise take it again."""
    with get_client(sync_client=True) as client:
        mine = client.read_flow_run(UUID(flow_run.id))
        assert mine.deployment_id
        other = client.create_flow_run_from_deployment(
            mine.deployment_id, parameters=mine.parameters, name=mine.name, tags=mine.tags, idempotency_key=str(mine.id)
        )
        waits = True
        while waits:
            time.sleep(POLLED)
            with contextlib.suppress(httpx.HTTPError):  # the server may be away
                state = client.read_flow_run(other.id).state
                waits = state is None or state.is_scheduled()
    return Completed(message=PASSED_ON.format(other.id))


def _until_worker() -> list[int]:
    """Return the ids of this process and of Prefect's processes above it."""
    me = psutil.Process()
    above = [parent.pid for parent in me.parents() if any(Path(part).name == "prefect" for part in parent.cmdline())]
    return [me.pid, *above]


if __name__ == "__main__":
    with closed_pipe.quiet():
        parser("flows.node").parse_known_args()
        sys.exit(refused("flows.node: a worker of Prefect's starts it, once for each host of a run"))
