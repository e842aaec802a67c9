"""Verdict on a configuration: whether its layout is legal and fits, its time, and other layouts that fit.

    plan(run, facts, gpu) -> Plan          plan of the configuration's layout; searches for others if it is refused
    facts_of(run) -> ModelFacts            from conf/models, by the model's Hub id, or from its folder's config.json
    teacher_of(run) -> ModelFacts          the same for the teacher of distillation; None without a teacher
    config_of(run) -> config, place        the model's config.json before its facts are read
    facts_in(config, place) -> ModelFacts  facts of a config.json
    compared(plan) -> Plan                 the plan with the fastest layout of the same GPUs
    settle(run, facts, gpu) -> Run         the run with the layout that layout.auto chooses

With a teacher, one layout must fit both the training and the teacher.

A layout is settled before it is planned. layout.auto uses the fastest layout that leaves more room than the error of a
plan; if there is none, the fastest that fits.

If full fine-tuning does not fit on its GPUs with room, LoRA is searched too. conf/planner/display.py shows plans.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf import families
from conf.model_facts import MODELS, ModelFacts, facts_from_hf
from conf.model_files import config_json, quantization
from conf.planner.hardware import GB, Gpu, unsupported
from conf.planner.memory import StageMemory, asking, memory
from conf.planner.search import TIGHT, Candidate, Found, changes, fastest, larger, search
from conf.planner.serving import layout as served
from conf.planner.serving import rollout as answering
from conf.planner.serving.layout import Serving
from conf.planner.serving.rollout import Rollout
from conf.planner.stage_needs import Asking, StageNeed, stage_needs
from conf.planner.timing import Timing, on_cpu, timing
from conf.rules import objectives, packed_base, reinforcement, schedule, serving
from conf.rules.layout import Grid, grid, problems
from conf.schema.model import CONFIG, Drawn
from conf.schema.run import Run
from conf.schema.sections import Adapter
from contract import json_object, regular_files
from contract.faults import ConfigError, Fault

LARGEST = 4096  # most GPUs for which faster layouts are searched, which takes a second
NOTEWORTHY = 1.02  # a layout must be this many times faster to be reported
MENDS = 2  # number of layouts to name that also fit the teacher
PACKED = ("fp8", "nvfp4", "int4")  # formats of model.base to offer, the nearest to bf16 first
WITH_LORA, WITH_BASE = "adapter.kind=lora adapter.experts=shared", "model.base="
HINT = "a folder with the model's config.json works as well, as {key} or paths.{place}"


class NothingFits(ConfigError):
    """No layout fits for layout.auto."""


@dataclass(frozen=True)
class Offer:
    """Hardware for all stages of a run (conf/planner/cheapest.py)."""

    gpu: str
    gpus: int
    cost: float  # USD, of all stages in sequence
    keys: str  # overrides that select it; empty if the run has them already


@dataclass(frozen=True)
class Plan:
    run: Run
    facts: ModelFacts
    gpu: Gpu
    problems: tuple[str, ...]
    cut: Grid | None = None  # this and the next fields: for a legal layout only
    stages: tuple[StageMemory, ...] = ()
    time: Timing | None = None  # None on a CPU
    cpu_step: float | None = None  # seconds of a step on this host's CPU, from a measured matrix product
    needs: tuple[StageNeed, ...] = ()  # of every stage of the flow
    # Other layouts, if this one is refused, by the overrides with which they were searched: "" for none, and WITH_LORA
    # if full fine-tuning does not fit with room, or a model.base with which LoRA fits, if the present one does not.
    instead: Mapping[str, Found] = field(default_factory=dict)
    not_searched: str = ""
    steps: int | None = None  # of the training; None if they depend on unknown data
    assumed: str = ""  # assumptions about unknown data
    noise: str = ""  # warning about too few held-out rows to show a gain
    serving: Serving | None = None  # the layout of the evaluation, on GPUs that can serve the model
    faster: Candidate | None = None  # the fastest layout with room, if it is faster than this one
    unpacked: Candidate | None = None  # a larger micro batch, with which unpacked rows are faster than these packs
    compared: bool = False  # whether a faster layout was searched
    cheapest: Offer | None = None  # for all stages, if it was searched and any hardware is known to fit
    unserved: str = ""  # why vLLM cannot serve the model, or cannot do so on hosts of the run
    rollout: Rollout | None = None  # vLLM next to reinforcement learning, if that is configured
    unanswered: str = ""  # why vLLM cannot answer prompts there
    asking: Asking | None = None  # the reference model, if the layout is legal for it
    unasked: str = ""  # why it cannot score the rows there

    @property
    def legal(self) -> bool:
        return not self.problems

    @property
    def fits(self) -> bool:
        return self.legal and self.fullest.over <= 0

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def verdict(self) -> str:
        if not self.legal:
            return f"refused: illegal, {len(self.problems)} rule{'s' * (len(self.problems) > 1)} broken"
        stage = self.fullest
        where = f"stage {stage.rank}, {stage.total / GB:.1f} GB of {stage.capacity / GB:.1f} on {self.gpu.name}"
        if not self.fits:
            return f"refused: legal, but lacks {stage.over / GB:.1f} GB on {where}"
        tight = "; less than the error of a plan" if -stage.over < TIGHT * stage.total else ""
        return f"legal and fits: {where}, {-stage.over / GB:.1f} GB left{tight}"


def plan(run: Run, facts: ModelFacts, gpu: Gpu, teacher: ModelFacts | None = None, rows: int | None = None) -> Plan:
    """Return the plan of a run. `rows` is the number of rows that its reference model scores."""
    evaluation, suits = _evaluation(run, facts, gpu), _suits(teacher, gpu)
    if broken := problems(run, facts) + _of_answers(run, facts) + unsupported(run, gpu):
        return Plan(run, facts, gpu, tuple(broken), **evaluation, **_instead(run, facts, gpu, suits))
    stages, time = tuple(memory(run, facts, gpu)), timing(run, facts, gpu) if gpu.cuda else None
    answers = _reinforcement(run, facts, gpu)
    reference = _reference(run, facts, gpu, teacher, rows)
    asked = evaluation["serving"], answers["rollout"], reference["asking"]
    needs = tuple(stage_needs(run, facts, gpu, stages, time, *asked))
    whole = {"cut": grid(run.layout, run.train), "stages": stages, "time": time, "needs": needs}
    if run.data.packed and time:
        whole["unpacked"] = larger(run, facts, gpu, time.likely / NOTEWORTHY)
    whole["steps"], whole["cpu_step"] = schedule.last_step(run), None if gpu.cuda else on_cpu(run, facts, gpu)
    legal = Plan(run, facts, gpu, (), **whole, **evaluation, **answers, **reference)
    return legal if legal.fits else replace(legal, **_instead(run, facts, gpu, suits))


def compared(planned: Plan) -> Plan:
    """Return the plan with a faster layout of the same GPUs that leaves room. Very large runs are not compared."""
    if not planned.fits or planned.time is None or planned.run.world > LARGEST:
        return planned
    run, gpu = planned.run, settled_on(planned.run, planned.gpu)
    found = fastest(run, planned.facts, gpu, run.world, below=planned.time.likely / NOTEWORTHY)
    return replace(planned, faster=found, compared=True)


def _evaluation(run: Run, facts: ModelFacts, gpu: Gpu) -> dict[str, Any]:
    """Return the layout of the evaluation, if there is one, and why it does not fit."""
    if not run.evaluate.tasks:
        return {"serving": None, "unserved": ""}
    why = "; ".join([*serving.unservable(run, facts, cpu=not gpu.cuda), *served.unsupported(run, gpu)])
    if why or not gpu.cuda:
        return {"serving": None, "unserved": why}
    return {"serving": served.choose(run, facts, gpu), "unserved": served.refusal(run, facts, gpu)}


def _of_answers(run: Run, facts: ModelFacts) -> list[str]:
    """Return the rules that a batch of reinforcement learning breaks, but a batch of training does not."""
    if not reinforcement.is_asked(run):
        return []
    known = problems(run, facts, suggest=False)
    found = problems(reinforcement.as_training(run), facts, suggest=False)
    asked = f"reinforce: {run.reinforce.prompts} prompts with {run.reinforce.samples} answers each"
    return [f"{asked}: {line}" for line in found if line not in known]


def _reinforcement(run: Run, facts: ModelFacts, gpu: Gpu) -> dict[str, Any]:
    """Return the plan of vLLM next to reinforcement learning, if that is configured, and why it cannot answer."""
    if not reinforcement.is_asked(run):
        return {"rollout": None, "unanswered": ""}
    why = answering.unanswered(run, facts, gpu)
    return {"rollout": None if why else answering.of(run, facts, gpu), "unanswered": why}


def _reference(run: Run, facts: ModelFacts, gpu: Gpu, teacher: ModelFacts | None, rows: int | None) -> dict[str, Any]:
    """Return the plan of the reference model, if there is one, and why it cannot score rows at a legal layout."""
    judge, found = teacher or facts, {"asking": None, "unasked": ""}
    if not objectives.has_reference(run) or (objectives.has_teacher(run) and teacher is None):
        return found
    asked, named = objectives.as_asked(run), f"train.teacher: {run.train.teacher}"
    if refused := objectives.unlike(run, facts, teacher, str(run.train.teacher)) if teacher else "":
        return found | {"unasked": refused}
    if broken := problems(asked, judge, suggest=False):
        return found | {"unasked": f"{named}: {'; '.join(broken)}. {_both(run, facts, gpu, teacher)}"}
    one = Asking(asked, judge, tuple(asking(asked, judge, gpu)), rows)
    found["asking"] = one
    if teacher and (lacks := one.fullest.over) > 0:
        text = f"it uses the layout of training, and lacks {lacks / GB:.1f} GB on {gpu.name}"
        found["unasked"] = f"{named}: {text}. {_both(run, facts, gpu, teacher)}"
    return found


def _suits(teacher: ModelFacts | None, gpu: Gpu, room: float = 0.0) -> Callable[[Run], bool]:
    """Return suits(run): whether the teacher fits at the layout of a run, and leaves this share of the memory free."""

    def suits(run: Run) -> bool:
        if teacher is None:
            return True
        asked = objectives.as_asked(run)
        return not problems(asked, teacher, suggest=False) and all(
            stage.over <= -room * stage.total for stage in asking(asked, teacher, gpu)
        )

    return suits


def _both(run: Run, facts: ModelFacts, gpu: Gpu, teacher: ModelFacts | None) -> str:
    """Return the keys of layouts that fit the training and its teacher, with room if possible."""
    try:
        found = _searched(run, facts, gpu, _suits(teacher, gpu, TIGHT)).offered[:MENDS]
        found = found or _searched(run, facts, gpu, _suits(teacher, gpu)).offered[:MENDS]
    except ConfigError as error:  # a number of GPUs that whole hosts cannot have
        return f"No other layout was searched: {error}"
    if not found:
        remedy = "take more or larger GPUs, or a smaller train.teacher"
        return f"No layout of {run.world} {gpu.name} fits both; {remedy}"
    return f"These fit both: {', or '.join(changes(run, layout.applied(run)) for layout in found)}"


def _searched(run: Run, facts: ModelFacts, gpu: Gpu, suits: Callable[[Run], bool]) -> Found:
    found = search(run, facts, gpu, run.layout.world)
    return replace(found, fitting=[layout for layout in found.fitting if suits(layout.applied(run))])


def settle(run: Run, facts: ModelFacts, gpu: Gpu, teacher: ModelFacts | None = None) -> Run:
    """Return the run with the best layout that fits instead of layout.auto, and with the layout of its evaluation.

    An explicit layout is kept.
    """
    if not run.layout.auto:
        return _with_evaluation(run, facts, gpu)
    hosts = settled_on(run, gpu)
    suits = _suits(teacher, hosts)
    if (best := fastest(run, facts, hosts, run.world)) and suits(best.applied(run)):
        return _with_evaluation(best.applied(run), facts, gpu)
    found = _searched(run, facts, hosts, suits)
    if not found.fitting:
        lacks = f"; closest is {found.closest.verdict}" if found.closest else ""
        both = " for the training and train.teacher" if teacher else ""
        raise NothingFits(f"layout.auto: no layout of {run.world} {gpu.name} is legal and fits{both}{lacks}")
    return _with_evaluation(found.offered[0].applied(run), facts, gpu)


def _with_evaluation(run: Run, facts: ModelFacts, gpu: Gpu) -> Run:
    chosen = _evaluation(run, facts, gpu)["serving"]
    return served.with_layout(run, chosen) if chosen and chosen.lacks <= 0 else run


def settled_on(run: Run, gpu: Gpu) -> Gpu:
    """Return the GPU with the run's number of GPUs per host, which layout.auto keeps."""
    return replace(gpu, per_host=run.layout.gpus_per_node)


def facts_of(run: Run) -> ModelFacts:
    return facts_in(*config_of(run))


def teacher_of(run: Run) -> ModelFacts | None:
    if not objectives.has_teacher(run):
        return None
    return facts_in(*config_of(objectives.at_teacher(objectives.of_teacher(run)), "train.teacher"))


def config_of(run: Run, key: str = "model.source") -> tuple[Any, str]:
    """Return the model's config.json, if it is known or on this host, and the prefix of its name in error messages."""
    source, form = run.model.source, ""
    if isinstance(source, Drawn):
        if isinstance(source.config, dict):
            return config_json.of_text(source.config), ""
        source = source.config
    if source.startswith("tiny://"):
        source, form = quantization.of_tiny(source)
    names = {f"tiny://{kind}": keys for kind, keys in families.tiny().items()}
    for file in sorted(MODELS.glob("*.json")):
        held = json.loads(file.read_text("utf-8"))
        names[file.stem] = held["config"]
        if held["source"].endswith(" config.json"):
            releases = (held["source"].removesuffix(" config.json"), *held.get("also", ()))  # of the same sizes
            names |= dict.fromkeys(releases, held["config"])
    if source in names:
        form_of = {quantization.KEY: quantization.OF_TINY[form]} if form else {}
        return config_json.of_text(names[source]) | form_of, ""
    for folder in (source.removesuffix(CONFIG), run.paths.model):
        if regular_files.is_there(config := Path(folder) / CONFIG):
            try:
                return config_json.of_text(json_object.read(config)), f"{config.parent}/"
            except Fault as fault:
                raise ConfigError(str(fault)) from None
    ids = ", ".join(name for name in names if "/" in name)
    hint = HINT.format(key=key, place="model" if key == "model.source" else "teacher")
    raise ConfigError(f"{key}: {source}: unknown model; known are {ids}; {hint}")


def facts_in(config: Any, place: str) -> ModelFacts:
    """Return the facts of a config.json. Error messages write `place` before its name."""
    try:
        return facts_from_hf(config)
    except ValueError as error:  # a line that begins with config.json
        raise ConfigError(f"{place}{error}") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{place}config.json: not the configuration of a model: {error}") from None


def _packed(run: Run, facts: ModelFacts, gpu: Gpu, suits: Callable[[Run], bool]) -> dict[str, Found]:
    """Return the layouts with the first format of a frozen base that is smaller than the run's and fits on its GPUs."""
    present = packed_base.format_of(run)
    for base in PACKED:
        packed = run.changed(model={"base": base})
        if (present and present.bytes <= packed_base.FORMATS[base].bytes) or [*packed_base.contradictions(packed)]:
            continue
        found = _searched(packed, facts, gpu, suits)
        if found.fitting:
            return {f"{WITH_BASE}{base}": found}
    return {}


def _instead(run: Run, facts: ModelFacts, gpu: Gpu, suits: Callable[[Run], bool]) -> dict[str, Any]:
    try:
        found = {"": _searched(run, facts, gpu, suits)}
        if run.adapter.kind == "none" and not found[""].roomy:
            with_lora = run.model_copy(update={"adapter": Adapter(targets="all-linear", experts="shared")})
            found[WITH_LORA] = _searched(with_lora, facts, gpu, suits)
        elif not found[""].fitting:
            found |= _packed(run, facts, gpu, suits)
        return {"instead": found}
    except ConfigError as error:  # a number of GPUs that whole hosts cannot have
        return {"not_searched": str(error)}
