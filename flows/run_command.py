"""Command line of the flows. It reads and checks its arguments before Prefect starts anything."""

import functools
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from conf.load import load
from conf.model_files import weights
from conf.overrides import from_overrides
from conf.planner import display
from conf.planner.display import duration
from conf.planner.verdict import Plan
from conf.rules import objectives
from conf.schema.run import Run
from contract.amounts import clock, size
from contract.faults import ConfigError, Fault
from flows import arguments
from flows.arguments import refused
from flows.new import rows
from flows.pipeline import PIPELINE
from tasks.run import artifact
from tasks.run.artifact import Artifact
from tasks.run.places import open_run_store, runs_folder
from tasks.run.steps import Request
from tasks.servers import prefect_server
from tasks.servers.waiting import limited_end
from tasks.sources import hub, row_sources
from tasks.sources.hub.api import Unreachable
from tasks.stages import plan
from tasks.store import Store

ENDS_WITHIN = 60.0  # seconds after a signal, in addition to the grace for a checkpoint; pods need 40 to end


@arguments.reports_faults
def command(flow, require: Callable[[Run], None] = lambda run: None, example: str = "tiny") -> int:
    """Run the flow and return the exit code: 0, 2 for an error that the user can fix, 1 for any other.

    `require` raises a Fault for a run of another flow. `example` names a configuration.
    """
    options = arguments.finetune(f"flows.{flow.name}").parse_intermixed_args()
    if options.conf is None:
        raise Fault(f"NAME: missing; it names a file, or a configuration in conf/, such as {example}")
    run = load(options.conf, options.overrides)
    require(run)
    for key in from_overrides(options.overrides).get("paths", {}):
        raise Fault(f"paths.{key}: the flow sets all paths; FINETUNE_RUNS names its folder")
    for name in filter(None, (options.from_stage, options.until_stage)):
        if name not in PIPELINE.names:
            raise Fault(f"{name}: not a stage; the stages are {', '.join(PIPELINE.names)}")
    PIPELINE.require_order(options.from_stage, options.until_stage)
    if options.dry_run:
        print("\n".join(_forecast(run, options.from_stage, options.until_stage)))
        return 0
    # All parameters were checked above. Prefect's check would refuse files outside of conf/, and nulls.
    try:
        prefect_server.use()
        with limited_end(run.gang.grace + ENDS_WITHIN, f"python -m tasks.tracking {runs_folder()} ships what waits"):
            state = flow.with_options(validate_parameters=False)(
                conf=options.conf,
                changes=from_overrides(options.overrides),
                from_stage=options.from_stage,
                until_stage=options.until_stage,
                return_state=True,
            )
    except KeyboardInterrupt:
        return refused("interrupted; results are kept, and the same command resumes", code=130)
    if state.is_failed() and state.message:
        refused(state.message)
    return 0 if state.is_completed() else 1 if state.name == "Crashed" else 2


def _forecast(run: Run, from_stage: str | None, until_stage: str | None) -> list[str]:
    """List the stages that would run, cached stages, and the cost. Without the Hub, use the files on this host."""
    asked = PIPELINE.asked(run, until_stage)
    try:
        planned = _possible(plan.settle(run), asked)
        request = PIPELINE.request(planned.run, from_stage, until_stage)
        store = open_run_store()
        _require_rows_to_learn_from(planned.run, request, store)
        lines = forecast(request, store, planned)
    except Unreachable as fault:
        planned = _possible(_recalled(run, fault), asked)
        lines = [str(fault), "So it is unknown which of these artifacts exist. By the config.json that is known here:"]
    return [*lines, *_lacks(planned, asked), *_takes(planned, asked), plan.summary(planned)]


Cost = tuple[str, float | None]  # as text, and in seconds if known


def forecast(request: Request, store: Store, planned: Plan) -> list[str]:
    """Return a line for each stage: its fingerprint, whether it is cached, the reason if not, and its estimated cost.

    The estimate comes from the record of an earlier artifact, else from the plan, else (as on a CPU) from the most
    similar artifact of the same model. Other models are not used.
    """
    width = max(map(len, request.stages))
    found, seconds, unknown = [], 0.0, []
    everything = functools.cache(lambda: artifact.by_fingerprint(store))
    for name, stage in request.stages.items():
        if name in request.unasked:
            continue
        stored = artifact.find(stage, store)
        if isinstance(stored, Artifact) and name not in request.again:
            line = f"hit   {size(stored.size)}, made in {clock(stored.made['seconds'])} by {stored.made['flow']}"
        else:
            known = stored if isinstance(stored, Artifact) else artifact.read(store, stage.key)
            reason = "made again, as requested" if isinstance(stored, Artifact) else stored.reason
            cost = _measured(known) if known else _planned(name, planned)
            text, took = cost or _similar(name, request, everything(), planned)
            line = f"miss  {reason}; {text}"
            seconds += took or 0.0
            unknown += [name] if took is None else []
        found.append(f"{name.ljust(width)}  {stage.fingerprint}  {line}")
    hours = seconds / 3600 * planned.run.world
    without = f", without {', '.join(unknown)}" if unknown else ""
    return [*found, f"known cost: {clock(seconds)} in sequence, {hours:.2f} process hours{without}"]


def _measured(known: Artifact) -> Cost:
    seconds = known.made["seconds"]
    return f"it took {clock(seconds)} and {size(known.size)} before", seconds


def _planned(name: str, planned: Plan) -> Cost | None:
    need = next((need for need in planned.needs if need.stage == name and need.seconds is not None), None)
    if need is None or need.seconds is None:
        return None
    return f"{duration(need.seconds)}{f' and {size(need.disk)}' if need.disk else ''} by the plan", need.seconds


def _similar(name: str, request: Request, everything: dict[str, Artifact], planned: Plan) -> Cost:
    """Return the cost of the most similar artifact from the same download."""
    stage, model = request.stages[name], request.stages["download"].fingerprint

    def is_of_model(other: Artifact) -> bool:
        chain = [other, *artifact.sources(other.stage, everything)]
        return any(model in one.stage.inputs.values() for one in chain)

    others = [other for other in everything.values() if other.stage.name == stage.name and other.key != stage.key]
    similar = artifact.most_similar(filter(is_of_model, others), stage)
    if similar is None:
        return "no similar artifact of this model exists yet", None
    seconds, speed = similar.made["seconds"], ""
    if name == "train" and (steps := planned.run.train.steps) and {"steps", "median_step_seconds"} <= {*similar.result}:
        step, more = similar.result["median_step_seconds"], steps - similar.result["steps"]
        seconds, speed = max(step, seconds + more * step), f", at {step:.3g} s per step"
    return f"about {clock(seconds)}{speed}, by a similar artifact of the same model", seconds


def _require_rows_to_learn_from(run: Run, request: Request, store: Store) -> None:
    """Raise a Fault for rows that training would refuse, if they are prepared, or local and of unknown kind.

    Reading rows takes seconds, so unprepared rows are read only for objectives that need more than one answer per row.
    """
    if "train" in request.unasked:
        return
    prepared = artifact.find(request.stages["prepare"], store)
    if isinstance(prepared, artifact.Artifact):
        place, kind = prepared.key, prepared.result["kind"]
    elif (
        objectives.has_reference(run) and (source := run.data.source) and row_sources.kind(source, rows.KEY) == "local"
    ):
        with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
            place, kind = source, objectives.kind_of(rows.look(run, None, Path(folder) / "rows").kind)
    else:
        return
    if fault := objectives.unfit(run, place, kind):
        raise Fault(fault)


def _recalled(run: Run, fault: Unreachable) -> Plan:
    try:
        return plan.recalled(run)
    except ConfigError:  # this host knows nothing about the model
        raise fault from None


def _possible(planned: Plan, asked: Collection[str]) -> Plan:
    if fault := plan.any_refusal(planned, asked, here=False):
        raise Fault(fault)
    return planned


def _lacks(planned: Plan, asked: Collection[str]) -> list[str]:
    """Return a line for each reason why this host can plan the run, but not run it."""
    source, fault = planned.run.model.source, plan.unserved(planned, asked)
    lines = [f"a run on this host would end with: {fault}"] if fault else []
    if not isinstance(source, str) or hub.kind(source) != "folder":
        return lines
    if not any(map(weights.are_of, Path(source).expanduser().iterdir())):
        lines.append(f"{source} holds no weights: a run ends at download until *.safetensors are there")
    return lines


def _takes(planned: Plan, asked: Collection[str]) -> list[str]:
    """Describe the needs of the requested stages, and the layout of the evaluation."""
    needs = [need for need in planned.needs if need.stage in asked]
    evaluated = any(need.stage.startswith("evaluate") for need in needs)
    how = ["", *display.evaluation(planned)] if evaluated and planned.serving else []
    ways = display.base(planned) if any(need.stage == "convert" for need in needs) else ()
    return ["", *display.stage_table(planned, needs), *ways, *how, ""] if needs else []
