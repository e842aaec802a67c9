"""The stages of a run: what each is made from, and so all fingerprints, before anything is made.

flows/pipeline/every_stage.py makes them, in this order and from these inputs (tests/tasks/stages/test_pipeline.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from conf.rules import objectives, pretraining, reinforcement
from conf.schema.run import Run
from contract.faults import Fault
from tasks.run.artifact import Stage
from tasks.run.request import Request
from tasks.stages import convert, download, evaluate, export, prepare, promote, reference, reinforce, train


@dataclass(frozen=True)
class Kind:
    """A stage of the pipeline, whatever the run."""

    name: str
    stage: Callable[..., Stage]  # of the run and its inputs: what is asked for
    inputs: dict[str, str] = field(default_factory=dict)  # the stage that makes each, by the name that it has here
    read: dict[str, str] = field(default_factory=dict)  # what it reads besides, which its inputs were made from
    also: dict[str, str] = field(default_factory=dict)  # inputs of a run whose keys ask for them, as its stage() says
    where_there: dict[str, str] = field(default_factory=dict)  # inputs that are these stages' where the run has those
    only: Callable[[Run], bool] = lambda _: True  # runs that have this stage
    gpus: bool = False  # has this host's GPUs in its turn
    of_evaluation: bool = False  # nothing to do without evaluate.tasks


PROMPTS = {"data": "prepare-prompts"}
PIPELINE = (
    Kind("download", download.stage),
    Kind("prepare", prepare.stage, {"model": "download"}),
    Kind("prepare-prompts", prepare.stage_of_prompts, {"model": "download"}, only=reinforcement.has_prompts),
    Kind("convert", convert.stage, {"model": "download"}, gpus=True),
    Kind(
        "evaluate-base",
        evaluate.stage,
        {"model": "download", "data": "prepare"},
        where_there=PROMPTS,
        gpus=True,
        of_evaluation=True,
    ),
    Kind("download-teacher", download.stage_of_teacher, only=objectives.has_teacher),
    Kind(
        "convert-teacher",
        convert.stage_of_teacher,
        {"model": "download-teacher"},
        only=objectives.has_teacher,
        gpus=True,
    ),
    Kind(
        "reference",
        reference.stage,
        {"base": "convert", "data": "prepare"},
        {"model": "download"},
        where_there={"base": "convert-teacher", "teacher": "download-teacher"},
        only=objectives.has_reference,
        gpus=True,
    ),
    Kind(
        "train",
        train.stage,
        {"base": "convert", "data": "prepare"},
        {"model": "download"},
        where_there={"reference": "reference"},
        gpus=True,
    ),
    Kind(
        "reinforce",
        reinforce.stage,
        {"base": "convert", "data": "prepare", "trained": "train"},
        {"model": "download"},
        where_there=PROMPTS,
        only=reinforcement.is_asked,
        gpus=True,
    ),
    Kind(
        "export",
        export.stage,
        {"model": "download", "trained": "train"},
        {"base": "convert"},
        where_there={"trained": "reinforce"},
    ),
    Kind(
        "evaluate-tuned",
        evaluate.stage,
        {"model": "export", "data": "prepare", "trained": "train"},
        {"released": "download"},
        {"before": "evaluate-base"},
        PROMPTS | {"trained": "reinforce"},
        gpus=True,
        of_evaluation=True,
    ),
    Kind(
        "promote",
        promote.stage,
        {"tuned": "export", "before": "evaluate-base", "after": "evaluate-tuned"},
        {"released": "download"},
        of_evaluation=True,
    ),
)
ORDER = tuple(kind.name for kind in PIPELINE)


def request(run: Run, first: str | None = None, last: str | None = None) -> Request:
    """The stages up to `last`, from `first` on made again. Asks the Hub or the store what the sources hold now."""
    require_order(first, last)
    again = ORDER[ORDER.index(first) :] if first else ()
    return Request(stages(run), unasked(run, last), frozenset(again))


def require_order(first: str | None, last: str | None) -> None:
    if first and last and ORDER.index(first) > ORDER.index(last):
        raise Fault(f"from-stage {first} lies behind until-stage {last}: nothing would be made again")


def stages(run: Run) -> dict[str, Stage]:
    """All stages of the run by name, in order."""
    found: dict[str, Stage] = {}
    for kind in PIPELINE:
        if kind.only(run):
            there = {name: maker for name, maker in kind.where_there.items() if maker in found}
            inputs = {name: found[maker] for name, maker in (kind.inputs | kind.also | there).items()}
            found[kind.name] = kind.stage(run, **inputs)
    return found


def asked(run: Run, last: str | None) -> list[str]:
    """Names of the stages that are to be made, in order. Asks nobody for what the sources hold."""
    left_out = unasked(run, last)
    return [kind.name for kind in PIPELINE if kind.only(run) and kind.name not in left_out]


def unasked(run: Run, last: str | None) -> dict[str, str]:
    """Reasons, by name, for stages that are not to be made. Without evaluate.tasks nothing says what to promote."""
    own = {kind.name for kind in PIPELINE if kind.only(run)}
    behind = [name for name in ORDER[ORDER.index(last) + 1 :] if name in own] if last else []
    reasons = dict.fromkeys(behind, "lies behind the last stage that was asked for")
    if not run.evaluate.tasks:
        reasons |= {kind.name: "evaluate.tasks is empty" for kind in PIPELINE if kind.of_evaluation}
    elif pretraining.is_drawn(run):
        reasons.setdefault("evaluate-base", "its weights are drawn, and know nothing yet")
    if reinforcement.is_asked(run) and run.reinforce.start == "base":
        reasons["train"] = "reinforce.start is base"
    return reasons


def is_evaluated(run: Run, last: str | None) -> bool:
    return any(kind.of_evaluation and kind.name not in unasked(run, last) for kind in PIPELINE)
