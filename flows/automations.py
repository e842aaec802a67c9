"""Automations of Prefect's server that restart a run whose process or host dies.

    python -m flows.automations              create or update them on the server of PREFECT_API_URL, or this checkout's
    python -m flows.automations --delete     remove them

A run that has stopped sending heartbeats is set to Crashed. (A live worker does this for its runs; if the host is gone,
only the server can.) A crashed run of finetune or pretrain waits a minute and returns to its pool, with the same
parameters, and each stage resumes. Runs stay as they are if they were cancelled or failed, if they have not run
since their last restart (for example because the flow cannot be imported), or if no deployment created them, because
then they have no pool. flows/automations.yaml has the rules.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import yaml
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings
from pydantic import TypeAdapter

from contract import closed_pipe
from contract.faults import Fault
from flows.arguments import reports_faults
from tasks.servers import prefect_server

FILE = Path(__file__).with_suffix(".yaml")
AUTOMATIONS = TypeAdapter(list[AutomationCore]).validate_python(yaml.safe_load(FILE.read_text()))


@reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.automations", description=__doc__.partition("\n")[0])
    parser.add_argument("--delete", action="store_true", help="remove them")
    remove = parser.parse_args(argv).delete
    with connected() as client:
        for wanted in AUTOMATIONS:
            print(f"{wanted.name}: {_remove(client, wanted) if remove else _make(client, wanted)}")
    return 0


@contextlib.contextmanager
def connected() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server at PREFECT_API_URL or of this checkout's server. Server errors become a Fault."""
    prefect_server.use_running()
    address = get_current_settings().api.url
    if not address:
        raise Fault("PREFECT_API_URL: names no server; make up starts one on this host")
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.HTTPError, PrefectException) as error:
        raise Fault(f"{address}: {str(error).partition('\n')[0]}") from None


def _make(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    """Create or update an automation.

    An automation that is up to date is not written again, because an update forgets which runs are active.
    """
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return "made"
    kept = wanted.model_copy(update={"enabled": found[0].enabled})  # an automation that somebody switched off stays off
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
