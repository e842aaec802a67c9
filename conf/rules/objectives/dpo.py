"""Objective dpo: prefer the chosen answer to the rejected one."""

from conf.rules import objectives
from conf.rules.objectives.objective import Objective, Problems
from conf.schema.run import Run

ANSWERS = "dpo reads a chosen and a rejected answer; preference"


def _problems(run: Run) -> Problems:
    layout = run.layout
    yield from objectives.of_pairs(run.data)
    for number, part in enumerate(run.data.mixture):
        if part.shape not in ("auto", "preference"):
            yield (f"data.mixture[{number}].shape", f"{part.shape}, but {ANSWERS}")
    if run.data.shape not in ("auto", "preference"):
        yield "data.shape", f"{run.data.shape}, but {ANSWERS}"
    if run.reinforce.steps:
        yield "reinforce.steps", f"{run.reinforce.steps}, but it is not supported after dpo; 0, or objective sft"
    if run.model.dropout:
        yield "model.dropout", f"{run.model.dropout:g} would make each answer differ from its reference; 0 with dpo"
    if layout.pp > 1 and run.moe.dispatcher == "allgather":
        yield "moe.dispatcher", "allgather, but stages of a pipeline exchange the sizes of dpo's batches; alltoall"
    if run.model.base != "bf16":
        yield "model.base", f"{run.model.base}, but train.objective dpo compares with the unpacked base; bf16"


OBJECTIVE = Objective(
    ("preference",),
    "rows with a chosen and a rejected answer",
    "trainer.objectives.dpo",
    keys=("dpo_beta", "dpo_label_smoothing"),
    figures=("rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin"),
    sequences=2,
    reference="start",
    problems=_problems,
)
