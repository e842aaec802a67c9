"""Objectives of training (train.objective): valid combinations of keys, and the data and models that a run needs.

    of(run)                      the Objective: a file of this folder, or an entry point `finetune.objectives`
    sequences(train) -> int      sequences per row: dpo has both answers in a forward pass

docs/extending/objective.md shows how to add one.
"""

import functools
import importlib
from collections.abc import Iterator

from conf.model_facts import ModelFacts
from conf.rules.objectives.objective import Objective
from conf.schema.data import Data
from conf.schema.named import OBJECTIVE_GROUP, OBJECTIVES, plugin
from conf.schema.run import Run
from conf.schema.sections import Adapter
from conf.schema.training import Train

AT_ONCE = 16  # micro batches that each rank, and each stage of a pipeline, sends through the reference at once


def named(name: str) -> Objective:
    """Return an objective: a file of this folder, or what an entry point of an installed package loads."""
    if name in OBJECTIVES:
        return _own(name)
    return plugin(OBJECTIVE_GROUP, name) or named(OBJECTIVES[0])  # a run that was validated has no unknown name


@functools.cache
def _own(name: str) -> Objective:
    return importlib.import_module(f"{__name__}.{name}").OBJECTIVE


def of(run: Run) -> Objective:
    return named(run.train.objective)


def has_reference(run: Run) -> bool:
    """Whether training needs another model's outputs for the rows."""
    return bool(of(run).reference)


def has_teacher(run: Run) -> bool:
    return of(run).reference == "teacher"


def of_teacher(run: Run) -> Run:
    """The run whose model is the teacher, to be fetched and converted."""
    return run.changed(
        model={"source": run.train.teacher, "tokenizer": None, "revision": "main", "merge_adapter": None}
    )


def at_teacher(run: Run) -> Run:
    """The run with the teacher's model and base on this host."""
    places = {"model": run.paths.teacher, "base": run.paths.teacher_base}
    return run.changed(paths=places)


def has_starting_adapter(run: Run) -> bool:
    """Whether the reference is the base with the adapter that the training starts from."""
    return of(run).reference == "start" and run.model.adapter is not None


def as_asked(run: Run) -> Run:
    """The run of the reference model, at the layout of training, with all weights frozen."""
    if has_starting_adapter(run):
        return run
    run = at_teacher(of_teacher(run)) if has_teacher(run) else run
    adapter = Adapter(kind="lora", targets=("linear_proj",), rank=run.layout.tp)  # disabled; freezes the rest
    return run.model_copy(update={"adapter": adapter})


def unlike(run: Run, facts: ModelFacts, teacher: ModelFacts, named: str) -> str:
    """The reason why this teacher's vocabulary does not fit the model; empty if it fits."""
    if teacher.vocab != facts.vocab:
        return f"train.teacher: {named}: a vocabulary of {teacher.vocab} tokens, but the model has {facts.vocab}"
    if teacher.vocab_pad or facts.vocab_pad:
        return f"train.teacher: {named}: GPT-2's vocabulary is padded with unused tokens; use another model"
    if run.train.teacher_top_k > teacher.vocab:
        return f"train.teacher_top_k: {run.train.teacher_top_k}, but {named} has only {teacher.vocab} tokens"
    return ""


def sequences(train: Train) -> int:
    return named(train.objective).sequences


def as_sft(run: Run) -> Run:
    """The run with objective sft and the same number of sequences, for artificial rows of one answer."""
    train, more = run.train, sequences(run.train)
    keys = {key: Train.model_fields[key].default for name in OBJECTIVES for key in named(name).keys}
    batches = {"global_batch": more * train.global_batch, "micro_batch": more * train.micro_batch}
    return run.changed(train={**keys, **batches, "objective": OBJECTIVES[0]})


def kind_of(shape: str) -> str:
    """Kind of prepared data, by the shape of their rows."""
    return shape if shape in ("preference", "text") else "sft"


def unfit(run: Run, place: str, kind: str) -> str:
    """The reason why the objective cannot use prepared data of this kind; empty if it can."""
    name, objective = run.train.objective, of(run)
    if kind in objective.kinds:
        return ""
    fitting = next((other for other in OBJECTIVES if kind in named(other).kinds), None)
    if fitting is None:
        return f"train.objective: {name} reads {objective.reads}, but {place} contains data of the kind {kind}"
    remedy = f"train.objective={fitting}"
    if fitting == "sft":
        shape = "data.shape=preference, if there are columns chosen and rejected, or another data.source"
        remedy = shape if "preference" in objective.kinds else "another data.source"
    return f"train.objective: {name} reads {objective.reads}, but {place} contains {named(fitting).reads}; use {remedy}"


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are valid alone and invalid together."""
    train = run.train
    for objective in OBJECTIVES:
        for key in named(objective).keys:
            if train.objective != objective and getattr(train, key) != Train.model_fields[key].default:
                yield f"train.{key}", f"has no effect with train.objective {train.objective}"
    next_token = of(run).next_token
    if train.z_loss and not next_token:
        yield "train.z_loss", f"{train.z_loss:g}, but train.objective {train.objective} has no z loss: 0"
    if train.batch_ramp and not next_token:
        yield "train.ramp_from", f"{train.ramp_from} is for texts, but {train.objective} reads rows; null"
    yield from of(run).problems(run)


def of_pairs(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for settings of data that exclude rows with two answers to one prompt."""
    if data.packed:
        yield "data.packed", "true, but the two answers of a row are padded, not packed; false"
    if data.loss_on == "all":
        yield "data.loss_on", "all, but with two answers to one prompt only the answers count; assistant"
    if data.too_long == "truncate":
        yield "data.too_long", "truncate would cut the two answers' prompts differently; drop"
