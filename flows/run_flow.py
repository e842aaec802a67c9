"""One run of the flows finetune and pretrain inside of Prefect: plan, run all stages, report."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC
from pathlib import PurePath
from typing import Any, Literal

from httpx import HTTPError
from prefect import Flow, State
from prefect.client.orchestration import get_client
from prefect.exceptions import FailedRun, PrefectException
from prefect.runtime import flow_run
from prefect.states import Failed

from conf.load import load
from conf.planner.verdict import Plan
from conf.schema.run import Run
from contract.faults import ConfigError, Fault
from flows import secret_blocks
from flows.pipeline import PIPELINE, run_stages
from tasks.run import accounts, artifact
from tasks.run.places import open_run_store
from tasks.run.session import Session
from tasks.run.steps import Request
from tasks.servers import prefect_server
from tasks.servers.waiting import no_lost_signals
from tasks.stages import run_report
from tasks.stages.plan import plan, tell

Stage = Literal[*PIPELINE.names]  # type: ignore[valid-type]


class CheckoutFlow(Flow):
    """A flow that uses the Prefect server of this checkout when it is called from Python."""

    def __call__(self, *args: Any, **parameters: Any) -> Any:
        prefect_server.use()
        return super().__call__(*args, **parameters)


def name_of_run() -> str:
    """Return the name of a flow run. A run that resumes after a crash keeps its name (flows/automations.py)."""
    return f"{PurePath(flow_run.parameters['conf']).stem}-{flow_run.scheduled_start_time.astimezone(UTC):%m%d-%H%M%S}"


@no_lost_signals()  # for a worker's process, which has no limited_end
def run_flow(
    conf: str,
    overrides: list[str],
    from_stage: str | None,
    until_stage: str | None,
    require: Callable[[Run], None] = lambda run: None,
) -> State:
    """Run the stages whose artifacts are missing. The returned state has a Result.

    `require` raises a Fault for a run that belongs to another flow.
    """
    logging.getLogger("prefect.flow_runs").addFilter(_has_news)
    begun = ExitStack()
    secret_blocks.use()
    try:
        run = load(conf, overrides)
        require(run)
        _label(run)
        planned = plan.submit(run, PIPELINE.asked(run, until_stage)).result()  # from config.json alone
        request = PIPELINE.request(planned.run, from_stage, until_stage)
        _require_quota(planned, request)
        session = begun.enter_context(Session(planned.run, request, flow_run.id, flow_run.name, planned.gpu))
    except (ConfigError, Fault) as fault:
        return Failed(message=str(fault))
    with begun:
        tell(session.tracking, planned)
        run_stages(session)
        run_report.publish(planned, session.outcomes, session.store, session.tracking, session.spent.total())
        made = run_report.result(session.outcomes, session.store, session.tracking)
    return session.outcomes.verdict(made)


def _label(run: Run) -> None:
    """Add owner and project to the tags of the flow run in Prefect."""
    # A busy server costs the tags, not the run.
    with suppress(HTTPError, PrefectException), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *accounts.labels(run)}))


def _require_quota(planned: Plan, request: Request) -> None:
    """Raise a Fault if the project has no GPU hours left for the training. A training in the store costs nothing."""
    store, stage = open_run_store(), request.stages["train"]
    if "train" in request.unasked or ("train" not in request.again and artifact.read(store, stage.key)):
        return
    needs, time = {}, planned.time
    if time and time.hours is not None:
        needs = {"gpu_hours": time.hours * planned.run.world, "usd": time.cost or 0.0}
    accounts.require_quota(planned.run, store, needs)


def _has_news(record: logging.LogRecord) -> bool:
    """Return whether to log a record. The stack trace of a failed run is dropped, because its state has the reason."""
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))
