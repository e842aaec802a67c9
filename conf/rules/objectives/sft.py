"""Objective sft: the next token, of answers or of texts."""

from conf.rules.objectives.objective import Objective

OBJECTIVE = Objective(
    ("sft", "text"), "rows with one answer, or texts", "trainer.objectives.sft", next_token=True, one_shape=True
)
