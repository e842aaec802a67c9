"""Objectives of training (train.objective): which values go with each, and what a run of it needs.

sequences(train) -> int      sequences of a row: dpo has both answers in a forward pass
"""

from collections.abc import Iterator

from conf.schema.data import Data
from conf.schema.run import Run
from conf.schema.training import Train

KIND = {"sft": ("sft", "text"), "dpo": ("preference",)}  # of prepared data, by objective
READS = {"sft": "rows with one answer, or texts", "dpo": "rows with a chosen and a rejected answer"}

ANSWERS = "dpo reads a chosen and a rejected answer; preference"

# What a step is looked at by beside its loss: means over rows, by the names that TRL's users know.
FIGURES = {
    "sft": (),
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin"),
}


def has_reference(run: Run) -> bool:
    """Whether what another model says of the rows is needed before training."""
    return run.train.objective == "dpo"


def sequences(train: Train) -> int:
    return 2 if train.objective == "dpo" else 1


def unfit(run: Run, place: str, kind: str) -> str:
    """The reason why prepared data of this kind are not what the objective learns from; empty where they are."""
    wanted = run.train.objective
    if kind in KIND[wanted]:
        return ""
    found = next(one for one, kinds in KIND.items() if kind in kinds)
    other = f"train.objective={found}" if found != "sft" else "another data.source or data.shape"
    return f"train.objective: {wanted} reads {READS[wanted]}, but {place} holds {READS[found]}; {other} would do"


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are right alone and wrong together."""
    train, layout = run.train, run.layout
    for key in ("dpo_beta", "dpo_label_smoothing"):
        if train.objective != "dpo" and getattr(train, key) != Train.model_fields[key].default:
            yield f"train.{key}", f"has no effect with train.objective {train.objective}"
    if train.objective != "dpo":
        return
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
    if train.batch_ramp:
        yield "train.ramp_from", f"{train.ramp_from} is for texts, and dpo reads rows; null"
    if run.model.dropout:
        yield "model.dropout", f"{run.model.dropout:g} would make each answer differ from its reference; 0 with dpo"
    if layout.nodes > 1:
        yield "layout.nodes", f"{layout.nodes}: what dpo compares with is asked on one host yet"
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
