"""Rules of validations, which decide whether a training ends early, and which of its checkpoints is the best."""

from collections.abc import Iterator

from conf.schema.run import Run


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are valid alone and invalid together."""
    every, save = run.train.validate_every, run.checkpoint.save_every
    best = run.checkpoint.keep_best
    if run.train.stop_after_worse is not None and not every:
        yield "train.stop_after_worse", "counts validations, but train.validate_every is 0"
    if best and not every:
        yield "checkpoint.keep_best", "needs validations, but train.validate_every is 0"
    elif best and isinstance(save, int) and isinstance(every, int) and save % every:
        why = "checkpoint.keep_best compares the validations of checkpoints"
        yield "checkpoint.save_every", f"{save} is not a multiple of train.validate_every {every}, but {why}"
    if run.export.checkpoint == "best" and not best:
        yield "export.checkpoint", "best, but checkpoint.keep_best is false"
    if run.export.checkpoint == "best" and run.reinforce.steps:
        yield "export.checkpoint", f"best, but reinforce.steps {run.reinforce.steps} have no validations"
    steps, step = run.reinforce.steps or run.train.steps, run.export.checkpoint
    if isinstance(step, int) and steps is not None and step > steps:
        yield "export.checkpoint", f"{step} is after the last step, {steps}"
