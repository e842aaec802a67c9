"""Check that prepared data fill a batch: Megatron-Bridge drops incomplete batches, and stops without a complete one.

The stage prepare checks it before a base is evaluated and GPUs are paid; trainer.train checks it again.
"""

from collections.abc import Mapping

from conf.schema.run import Run


def lacking(run: Run, place: str, kind: str, rows: Mapping[str, int], sequences: Mapping[str, int]) -> str:
    """The reason why these prepared data are too few for training or validation; empty if they are enough."""
    batch, training, validation = run.train.global_batch, sequences["training"], sequences["validation"]
    if kind == "text":
        batch = 1  # texts are repeated until there are enough
    if training < batch:
        ways = [f"a train.global_batch of at most {training}"] if training else []
        ways += ["more rows"]
        if run.data.packed and rows["training"] >= batch:
            ways += ["data.packed: false"]
        packed = f", packed from {rows['training']} rows" if run.data.packed else ""
        text = f"{place} contains {training} sequences for training{packed}"
        return f"train.global_batch: {batch}, but {text}; use {' or '.join(ways)}"
    if run.train.validate_every and validation < batch:
        return (
            f"train.validate_every: {run.train.validate_every}, but {place} contains {validation} sequences for "
            f"validation, fewer than one batch of {batch}; use a larger data.validation, a smaller train.global_batch, "
            "or train.validate_every: 0"
        )
    return ""
