"""Command line of the flows. It reads and checks its arguments before Prefect starts anything."""

import argparse
from collections.abc import Callable

from conf.load import load
from conf.overrides import from_overrides
from conf.planner import display
from conf.planner.verdict import Plan
from conf.schema.run import Run
from contract.faults import ConfigError, Fault
from flows.arguments import of_a_run, refused
from tasks.run import forecast, own_server
from tasks.run.places import open_run_store
from tasks.run.request import Request
from tasks.stages import pipeline, plan


def command(flow, description: str, require: Callable[[Run], None] = lambda run: None, default: str = "tiny") -> int:
    """Run the flow and return the exit code: 0, 2 for a fault that the caller can mend, 1 for anything else.

    `require` raises a Fault for a run that is not the flow's to make. `default` is the configuration that is taken
    where none is named.
    """
    options = _arguments(f"flows.{flow.name}", description, default)
    try:
        run = load(options.conf, options.overrides)
        require(run)
        for key in from_overrides(options.overrides).get("paths", {}):
            raise Fault(f"paths.{key}: where things lie is the flow's own affair; FINETUNE_RUNS names its folder")
        first, last = _stage(options.first), _stage(options.last)
        pipeline.require_order(first, last)
        if options.dry_run:
            planned = plan.settle(run)
            if fault := plan.refusal(planned) or plan.unserved(planned, last) or plan.unanswered(planned, last):
                raise Fault(fault)
            run = planned.run
            asked = pipeline.request(run, first, last)
            would = forecast.lines(asked, open_run_store(), planned)
            print("\n".join([*would, *_takes(planned, asked), plan.summary(planned)]))
            return 0
    except (ConfigError, Fault) as fault:
        return refused(fault)
    # All was checked above, and the deployments' form knows neither files outside of conf/ nor nulls.
    try:
        own_server.start()
        state = flow.with_options(validate_parameters=False)(
            conf=options.conf,
            changes=from_overrides(options.overrides),
            from_stage=first,
            until_stage=last,
            return_state=True,
        )
    except Fault as fault:
        return refused(fault)
    except KeyboardInterrupt:
        return refused("interrupted; what was made is kept, and the same command goes on from there", code=130)
    if state.is_failed() and state.message:
        refused(state.message)
    return 0 if state.is_completed() else 1 if state.name == "Crashed" else 2


def _takes(planned: Plan, asked: Request) -> list[str]:
    """What the stages take that are asked for, and the evaluation if it is among them."""
    needs = [need for need in planned.needs if need.stage in asked.stages and need.stage not in asked.unasked]
    evaluated = any(need.stage.startswith("evaluate") for need in needs)
    how = ["", *display.evaluation(planned)] if evaluated and planned.serving else []
    ways = display.base(planned) if any(need.stage == "convert" for need in needs) else ()
    return ["", *display.stage_table(planned, needs), *ways, *how, ""] if needs else []


def _arguments(module: str, description: str, default: str) -> argparse.Namespace:
    stages = ", ".join(pipeline.ORDER)
    parser = of_a_run(module, description, example="optimizer.lr=2e-4", default=default)
    parser.epilog = (
        f"Stages, in order: {stages}. FINETUNE_STORE names the store (s3://bucket/prefix or a folder), "
        "FINETUNE_RUNS the local folder for work and caches (runs), MLFLOW_TRACKING_URI the tracking server."
    )
    parser.add_argument("--until-stage", "--until", dest="last", metavar="STAGE", help="end after this stage")
    again = "make this stage and all behind it anew"
    parser.add_argument("--from-stage", "--from", dest="first", metavar="STAGE", help=again)
    parser.add_argument("--dry-run", action="store_true", help="print what would run and what it would cost")
    return parser.parse_intermixed_args()


def _stage(name: str | None) -> str | None:
    if name is None or name in pipeline.ORDER:
        return name
    raise Fault(f"{name}: no stage; there are {', '.join(pipeline.ORDER)}")
