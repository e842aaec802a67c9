"""Fine-tune: a released model and a data set in; a better model out, registered, and the reasons for all of it.

    python -m flows.finetune tiny                                  on this host; no server needed
    python -m flows.finetune glm47 optimizer.lr=2e-4 --dry-run     what would run, what is there already, and the cost
    prefect deployment run finetune/glm47                          on a work pool (prefect.yaml)

A run whose plan does not fit ends before anything is downloaded (hardware.gate).
A stage whose artifact is in the store already ends as Cached. One that was interrupted goes on where it was.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import inspect
import sys
from datetime import UTC
from pathlib import PurePath
from typing import Literal

from prefect import State, allow_failure, flow
from prefect.runtime import flow_run
from prefect.states import Failed

from conf.load import load
from conf.overrides import Changes, Name, as_overrides
from contract import closed_pipe
from contract.faults import ConfigError, Fault
from flows.command import command
from tasks.run.session import Session
from tasks.stages import run_report
from tasks.stages.convert import convert
from tasks.stages.download import download
from tasks.stages.evaluate import evaluate_base, evaluate_tuned
from tasks.stages.export import export
from tasks.stages.pipeline import ORDER, request
from tasks.stages.plan import plan, tell
from tasks.stages.prepare import prepare, prepare_prompts
from tasks.stages.promote import promote
from tasks.stages.reinforce import reinforce
from tasks.stages.train import train

Stage = Literal[*ORDER]  # type: ignore[valid-type]


def name_of_run() -> str:
    """Name of a flow run. A run that goes on after a crash keeps it (flows/automations.py)."""
    return f"{PurePath(flow_run.parameters['conf']).stem}-{flow_run.scheduled_start_time.astimezone(UTC):%m%d-%H%M%S}"


@flow(name="finetune", flow_run_name=name_of_run, persist_result=False)
def finetune(
    conf: Name = "tiny",  # pyright: ignore[reportInvalidTypeForm]: a choice that depends on what lies in conf/
    changes: Changes = {},  # noqa: B006  # pyright: ignore[reportInvalidTypeForm, reportArgumentType]
    from_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    until_stage: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    first: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
    last: Stage | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> State:
    """Plan, download, convert, prepare, train, export, evaluate and promote; what is there already is not made again.

    Args:
        conf: The configuration in conf/ that the run starts from.
        changes: Keys that differ from it.
        from_stage: Make this stage and all behind it anew.
        until_stage: End after this stage.
        first: Former name of from_stage.
        last: Former name of until_stage.
    """
    until_stage = until_stage or last
    try:
        planned = plan.submit(load(conf, as_overrides(changes)), until_stage).result()  # from config.json alone
        asked = request(planned.run, from_stage or first, until_stage)
    except (ConfigError, Fault) as fault:
        return Failed(message=str(fault))
    with Session(planned.run, asked, flow_run.id, flow_run.name) as session:
        tell(session.tracking, planned)
        model = download.submit(session.stage("download"))  # GLM-4.7: 716 GB
        data = prepare.submit(session.stage("prepare"), model)  # the tokenizer is the model's
        prompted = data
        if "prepare-prompts" in asked.stages:
            prompted = prepare_prompts.submit(session.stage("prepare-prompts"), model)
        base = convert.submit(session.stage("convert"), model)  # as large again; 1 minute for each 4 GB and process
        before = evaluate_base.submit(session.stage("evaluate-base"), model, prompted)  # before training, or beside it
        earlier = session.before_training(before)
        trained = train.submit(session.stage("train"), model, base, data, wait_for=earlier)  # the hours and the money
        policy = trained
        if "reinforce" in asked.stages:
            policy = reinforce.submit(session.stage("reinforce"), model, base, prompted, trained)
        tuned = export.submit(session.stage("export"), model, base, policy)  # as large again
        after = evaluate_tuned.submit(
            session.stage("evaluate-tuned"), tuned, prompted, policy, model, allow_failure(before)
        )
        promoted = promote.submit(session.stage("promote"), tuned, before, after, model)
        session.needs(before)
        for future in (model, data, prompted, base, before, trained, policy, tuned, after, promoted):
            future.wait()
        run_report.publish(planned, session.outcomes, session.store, session.tracking)
    return session.outcomes.verdict()


# Schedules, edited deployments and runs that a server restarts may have the former names. Forms show the others alone.
_shown = inspect.signature(finetune.fn)
finetune.__signature__ = _shown.replace(
    parameters=[one for name, one in _shown.parameters.items() if name not in ("first", "last")]
)


if __name__ == "__main__":
    with closed_pipe.quiet():
        sys.exit(command(finetune, __doc__))
