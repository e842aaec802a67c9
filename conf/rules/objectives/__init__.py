"""Objectives of training (train.objective): which values go with each, and what a run of it needs.

sequences(train) -> int      sequences of a row: dpo has both answers in a forward pass
"""

from collections.abc import Iterator

from conf.model_facts import ModelFacts
from conf.schema.data import Data
from conf.schema.run import Run
from conf.schema.sections import Adapter
from conf.schema.training import Train

KIND = {"sft": ("sft", "text"), "dpo": ("preference",), "distill": ("sft",)}  # of prepared data, by objective
READS = {
    "sft": "rows with one answer, or texts",
    "dpo": "rows with a chosen and a rejected answer",
    "distill": "rows with one answer",
}
KEYS = {"dpo": ("dpo_beta", "dpo_label_smoothing"), "distill": ("teacher", "teacher_top_k", "distill_temperature")}

AT_ONCE = 16  # micro batches that each rank, and each stage of a pipeline, asks a reference of in one go
ANSWERS = "dpo reads a chosen and a rejected answer; preference"

# What a step is looked at by beside its loss: means over rows, by the names that TRL's users know.
FIGURES = {
    "sft": (),
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin"),
    "distill": ("kl",),
}


def has_reference(run: Run) -> bool:
    """Whether what another model says of the rows is needed before training."""
    return run.train.objective in KEYS


def has_teacher(run: Run) -> bool:
    return run.train.objective == "distill"


def of_teacher(run: Run) -> Run:
    """The run whose model is the teacher, to be fetched and converted."""
    model = run.model.model_copy(update={"source": run.train.teacher, "tokenizer": None, "revision": "main"})
    return run.model_copy(update={"model": model})


def at_teacher(run: Run) -> Run:
    """The run whose model and base on this host are the teacher's."""
    places = {"model": run.paths.teacher, "base": run.paths.teacher_base}
    return run.model_copy(update={"paths": run.paths.model_copy(update=places)})


def has_starting_adapter(run: Run) -> bool:
    """Whether what a training is compared with is the base with the adapter that it starts from."""
    return run.train.objective == "dpo" and run.model.adapter is not None


def as_asked(run: Run) -> Run:
    """The run of the model that is asked of the rows, at the layout of training, with nothing trained of it."""
    if has_starting_adapter(run):
        return run
    run = at_teacher(of_teacher(run)) if has_teacher(run) else run
    adapter = Adapter(kind="lora", targets=("linear_proj",), rank=run.layout.tp)  # is off, and has all else frozen
    return run.model_copy(update={"adapter": adapter})


def unlike(run: Run, facts: ModelFacts, teacher: ModelFacts, named: str) -> str:
    """The reason why a teacher of this name cannot teach a model, by their sizes; empty where it can."""
    if teacher.vocab != facts.vocab:
        return f"train.teacher: {named}: a vocabulary of {teacher.vocab} tokens; the model has {facts.vocab}"
    if teacher.vocab_pad or facts.vocab_pad:
        return f"train.teacher: {named}: GPT-2's vocabulary is padded with tokens that are none; another model"
    if run.train.teacher_top_k > teacher.vocab:
        return f"train.teacher_top_k: {run.train.teacher_top_k}, and {named} has {teacher.vocab} tokens at all"
    return ""


def sequences(train: Train) -> int:
    return 2 if train.objective == "dpo" else 1


def as_sft(run: Run) -> Run:
    """The run with sequences of one answer each, as many: of made-up rows, which have no other and no teacher."""
    train, more = run.train, sequences(run.train)
    keys = {key: Train.model_fields[key].default for keys in KEYS.values() for key in keys}
    keys |= {"objective": "sft", "global_batch": more * train.global_batch, "micro_batch": more * train.micro_batch}
    return run.model_copy(update={"train": train.model_copy(update=keys)})


def kind_of(shape: str) -> str:
    """Kind of prepared data, by the shape of their rows."""
    return shape if shape in ("preference", "text") else "sft"


def unfit(run: Run, place: str, kind: str) -> str:
    """The reason why prepared data of this kind are not what the objective learns from; empty where they are."""
    wanted = run.train.objective
    if kind in KIND[wanted]:
        return ""
    found = next((one for one, kinds in KIND.items() if kind in kinds), None)
    if found is None:
        return f"train.objective: {wanted} reads {READS[wanted]}, but {place} holds data of the kind {kind}"
    shape = "data.shape=preference, if there are columns chosen and rejected, or another data.source"
    other = f"train.objective={found}" if found != "sft" else shape if wanted == "dpo" else "another data.source"
    return f"train.objective: {wanted} reads {READS[wanted]}, but {place} holds {READS[found]}; {other} would do"


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are right alone and wrong together."""
    train = run.train
    for objective, keys in KEYS.items():
        for key in keys:
            if train.objective != objective and getattr(train, key) != Train.model_fields[key].default:
                yield f"train.{key}", f"has no effect with train.objective {train.objective}"
    if train.objective == "sft":
        return
    if train.z_loss:
        yield "train.z_loss", f"{train.z_loss:g}, and train.objective {train.objective} has none: 0"
    if train.batch_ramp:
        yield "train.ramp_from", f"{train.ramp_from} is for texts, and {train.objective} reads rows; null"
    yield from _of_dpo(run) if train.objective == "dpo" else _of_distillation(run)


def _of_distillation(run: Run) -> Iterator[tuple[str, str]]:
    train, data = run.train, run.data
    if train.teacher is None:
        yield "train.teacher", "required with train.objective distill: a Hub id, a folder, s3://... or tiny://KIND"
    if data.packed:
        yield "data.packed", "true, but the rows of distill are padded, not packed; false"
    for number, part in enumerate(data.parts):
        if part.shape in ("text", "preference"):
            key = f"data.mixture[{number}].shape" if data.mixture else "data.shape"
            yield key, f"{part.shape}, but distill reads rows with one answer; pairs or messages"


def _of_dpo(run: Run) -> Iterator[tuple[str, str]]:
    layout = run.layout
    yield from of_pairs(run.data)
    for number, part in enumerate(run.data.mixture):
        if part.shape not in ("auto", "preference"):
            yield (
                f"data.mixture[{number}].shape",
                f"{part.shape}, but {ANSWERS}",
            )
    if run.data.shape not in ("auto", "preference"):
        yield "data.shape", f"{run.data.shape}, but {ANSWERS}"
    if run.reinforce.steps:
        yield (
            "reinforce.steps",
            f"{run.reinforce.steps}, but nothing says yet how it follows dpo; 0, or objective sft",
        )
    if run.model.dropout:
        yield "model.dropout", f"{run.model.dropout:g} would make each answer differ from its reference; 0 with dpo"
    if layout.pp > 1 and run.moe.dispatcher == "allgather":
        yield "moe.dispatcher", "allgather, but stages of a pipeline exchange the sizes of dpo's batches; alltoall"


def of_pairs(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for settings of data that do not go with two answers to one prompt."""
    if data.packed:
        yield "data.packed", "true, but the two answers of a row are padded, not packed; false"
    if data.loss_on == "all":
        yield "data.loss_on", "all, but of two answers to one prompt the answers alone count; assistant"
    if data.too_long == "truncate":
        yield "data.too_long", "truncate would cut the two answers' prompts differently; drop"
