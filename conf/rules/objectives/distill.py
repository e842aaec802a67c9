"""Objective distill: the teacher's distribution of the next token of answers."""

from conf.rules.objectives.objective import Objective, Problems
from conf.schema.run import Run


def _problems(run: Run) -> Problems:
    train, data = run.train, run.data
    if train.teacher is None:
        yield "train.teacher", "required with train.objective distill: a Hub id, a folder, s3://... or tiny://KIND"
    if data.packed:
        yield "data.packed", "true, but the rows of distill are padded, not packed; false"
    for number, part in enumerate(data.parts):
        if part.shape in ("text", "preference"):
            key = f"data.mixture[{number}].shape" if data.mixture else "data.shape"
            yield key, f"{part.shape}, but distill reads rows with one answer; pairs or messages"
    if run.model.base != "bf16" and run.convert.to == "packed":
        yield "convert.to", "packed, but train.objective distill reads its teacher's base unpacked; none"


OBJECTIVE = Objective(
    ("sft",),
    "rows with one answer",
    "trainer.objectives.distill",
    keys=("teacher", "teacher_top_k", "distill_temperature"),
    figures=("kl",),
    reference="teacher",
    problems=_problems,
)
