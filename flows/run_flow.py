"""All stages of one run: the body of the flows finetune and pretrain, inside a run of Prefect's."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC
from pathlib import PurePath
from typing import Literal

from prefect import State, allow_failure
from prefect.exceptions import FailedRun
from prefect.runtime import flow_run
from prefect.states import Failed

from conf.load import load
from conf.schema.run import Run
from contract.faults import ConfigError, Fault
from flows.pipeline.steps import Steps
from tasks.run.session import Session
from tasks.stages import result, run_report
from tasks.stages.convert import convert, convert_teacher
from tasks.stages.download import download, download_teacher
from tasks.stages.evaluate import evaluate_base, evaluate_tuned
from tasks.stages.export import export
from tasks.stages.pipeline import ORDER, request
from tasks.stages.plan import plan, tell
from tasks.stages.prepare import prepare, prepare_prompts
from tasks.stages.promote import promote
from tasks.stages.reference import reference
from tasks.stages.reinforce import reinforce
from tasks.stages.train import train

Stage = Literal[*ORDER]  # type: ignore[valid-type]


def name_of_run() -> str:
    """Name of a flow run. A run that goes on after a crash keeps it (flows/automations.py)."""
    return f"{PurePath(flow_run.parameters['conf']).stem}-{flow_run.scheduled_start_time.astimezone(UTC):%m%d-%H%M%S}"


def make(
    conf: str,
    overrides: list[str],
    from_stage: str | None,
    until_stage: str | None,
    require: Callable[[Run], None] = lambda run: None,
) -> State:
    """Make the artifacts that are missing. `require` raises a Fault for another flow's run. The state has a Result."""
    logging.getLogger("prefect.flow_runs").addFilter(_has_news)
    begun = ExitStack()
    try:
        run = load(conf, overrides)
        require(run)
        planned = plan.submit(run, until_stage).result()  # from config.json alone
        asked = request(planned.run, from_stage, until_stage)
        session = begun.enter_context(Session(planned.run, asked, flow_run.id, flow_run.name))
    except (ConfigError, Fault) as fault:
        return Failed(message=str(fault))
    with begun:
        tell(session.tracking, planned)
        steps = Steps()
        model = steps.add(download, session.stage("download"))  # GLM-4.7: 716 GB
        data = steps.add(prepare, session.stage("prepare"), model)  # the tokenizer is the model's
        prompted = data
        if "prepare-prompts" in asked.stages:
            prompted = steps.add(prepare_prompts, session.stage("prepare-prompts"), model)
        base = steps.add(convert, session.stage("convert"), model)  # as large again; 1 minute for each 4 GB and process
        before = steps.add(evaluate_base, session.stage("evaluate-base"), model, prompted)
        judge, teacher = base, None
        if "download-teacher" in asked.stages:
            teacher = steps.add(download_teacher, session.stage("download-teacher"))
            judge = steps.add(convert_teacher, session.stage("convert-teacher"), teacher)
        said = None
        if "reference" in asked.stages:
            said = steps.add(reference, session.stage("reference"), model, judge, data, teacher)
        earlier = session.before_training(before)  # before training, or at the same time
        trained = steps.add(
            train, session.stage("train"), model, base, data, said, wait_for=earlier
        )  # the hours, the money
        policy = trained
        if "reinforce" in asked.stages:
            policy = steps.add(reinforce, session.stage("reinforce"), model, base, prompted, trained)
        tuned = steps.add(export, session.stage("export"), model, base, policy)  # as large again
        after = steps.add(
            evaluate_tuned, session.stage("evaluate-tuned"), tuned, prompted, policy, model, allow_failure(before)
        )
        steps.add(promote, session.stage("promote"), tuned, before, after, model)
        for step in steps.run():
            if step is before:
                session.require_base()
        run_report.publish(planned, session.outcomes, session.store, session.tracking)
        made = result.of(session.outcomes, session.store, session.tracking)
    return session.outcomes.verdict(made)


def _has_news(record: logging.LogRecord) -> bool:
    """Whether to log a record. The engine's stack trace of a failed run is left out: its state has the reason."""
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))
