"""The loss of a frozen output layer, which has the logits of some tokens at a time."""

from conf.rules import objectives, reinforcement
from conf.schema.run import Run

LOGITS = 2**29  # 1 GB in bf16


def is_chunked(run: Run) -> bool:
    """Whether the loss needs neither the gradient of the output layer nor all logits of a micro batch."""
    all_logits = run.train.z_loss > 0 or objectives.has_teacher(run) or reinforcement.is_policy(run)
    return run.adapter.kind != "none" and run.layout.tp == 1 and not all_logits
