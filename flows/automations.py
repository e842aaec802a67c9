"""Automations of Prefect's server that restart a run whose process or host dies.

    python -m flows.automations              create or update them on the server of PREFECT_API_URL, or this checkout's
    python -m flows.automations --delete     remove them

A run that has stopped sending heartbeats is set to Crashed. (A live worker does this for its runs; if the host is gone,
only the server can.) A crashed run of finetune or pretrain waits a minute and returns to its pool, with the same
parameters, and each stage resumes. Runs stay as they are if they were cancelled or failed, if they have not run
since their last restart (for example because the flow cannot be imported), or if no deployment created them, because
then they have no pool.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

import httpx
from prefect.automations import AutomationCore, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.settings import get_current_settings

from contract import closed_pipe
from tasks.servers import prefect_server

# Ten beats (prefect.yaml). Narrower than three, healthy runs were found dead, and while the server is away nobody is
# heard. A process that was found dead and lives holds the lease of its stage: its successor waits for that.
SILENT = timedelta(seconds=300)
# A worker tells of a death twice, the second time some seconds after the first (12 were seen). A run that has started
# again by then loses its place among those that its deployment allows at once, and Prefect ends it for that.
PAUSE = timedelta(seconds=60)
RESTARTS = 5  # of one run
REMEMBERED = timedelta(days=365)  # how long ago a run may have started that is given back
FLOW_RUN = "prefect.flow-run"
AWAITING = "AwaitingRestart"  # of the type CRASHED: such a run cannot crash again
ENDS = {f"{FLOW_RUN}.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
DEPLOYED = {"prefect.resource.role": "deployment"}


def _of_flow(*names: str) -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": list(names)}


def _to(state: StateType, message: str, name: str | None = None) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=state, name=name, message=message, force=name is not None)


AUTOMATIONS = (
    AutomationCore(
        name="finetune: a run that is silent has crashed",
        description="Its process, or the host, is gone. python -m flows.automations made this.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{FLOW_RUN}.*"},
            match_related=[_of_flow("finetune", "pretrain", "node"), DEPLOYED],
            for_each={"prefect.resource.id"},
            after={f"{FLOW_RUN}.heartbeat"},
            expect={f"{FLOW_RUN}.heartbeat"} | ENDS,
            within=SILENT,
        ),
        actions=[_to(StateType.CRASHED, f"no heartbeat for {SILENT.seconds} s")],
    ),
    # The count rises with each Running, and each Running allows one restart: what crashes before it has none. A stage
    # that failed for no known reason ends its run in a state that is called Crashed too, of the type FAILED.
    AutomationCore(
        name="finetune: a run that has crashed awaits its restart",
        description=f"At most {RESTARTS} times. python -m flows.automations made this.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            match={
                "prefect.resource.id": f"{FLOW_RUN}.*",
                "prefect.state-type": ["RUNNING", "CRASHED"],
                "prefect.run-count": [str(count) for count in range(1, RESTARTS + 1)],
            },
            match_related=[_of_flow("finetune", "pretrain"), DEPLOYED],
            for_each={"prefect.resource.id"},
            after={f"{FLOW_RUN}.Running"},
            expect={f"{FLOW_RUN}.Crashed"},
            within=REMEMBERED,
        ),
        actions=[_to(StateType.CRASHED, f"restarts in {PAUSE.seconds} s", AWAITING)],
    ),
    AutomationCore(
        name="finetune: restart a crashed run",
        description="On its work pool. python -m flows.automations made this.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": f"{FLOW_RUN}.*"},
            match_related=[_of_flow("finetune", "pretrain"), DEPLOYED],
            for_each={"prefect.resource.id"},
            after={f"{FLOW_RUN}.{AWAITING}"},
            expect={f"{FLOW_RUN}.Scheduled", f"{FLOW_RUN}.Running"} | ENDS,  # somebody was faster
            within=PAUSE,
        ),
        actions=[_to(StateType.SCHEDULED, "restarted after a crash")],
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.automations", description=__doc__.partition("\n")[0])
    parser.add_argument("--delete", action="store_true", help="remove them")
    remove = parser.parse_args(argv).delete
    prefect_server.use_running()
    address = get_current_settings().api.url
    if not address:
        print("error: PREFECT_API_URL: names no server; make up starts one on this host", file=sys.stderr)
        return 2
    try:
        with get_client(sync_client=True) as client:
            for wanted in AUTOMATIONS:
                print(f"{wanted.name}: {_remove(client, wanted) if remove else _make(client, wanted)}")
    except httpx.HTTPError as error:
        print(f"error: {address}: {error}", file=sys.stderr)
        return 2
    return 0


def _make(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    """Make or update an automation.

    One that is right already is not touched: an update forgets which runs are under way.
    """
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return "made"
    kept = wanted.model_copy(update={"enabled": found[0].enabled})  # who switched it off meant to
    if AutomationCore(**found[0].model_dump(exclude={"id"})) == kept:
        return "there already" if kept.enabled else "there already, switched off"
    client.update_automation(found[0].id, kept)
    return "updated"


def _remove(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    found = client.read_automations_by_name(wanted.name)
    for automation in found:
        client.delete_automation(automation.id)
    return "removed" if found else "not there"


if __name__ == "__main__":
    closed_pipe.run(main)
