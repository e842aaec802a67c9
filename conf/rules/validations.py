"""Rules of validations, which decide where a training ends early, and which of its checkpoints is the best."""

from collections.abc import Iterator

from conf.schema.run import Run


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are right alone and wrong together."""
    every, save = run.train.validate_every, run.checkpoint.save_every
    best = run.checkpoint.keep_best
    if run.train.stop_after_worse is not None and not every:
        yield "train.stop_after_worse", "counts validations, and train.validate_every is 0: there are none"
    if best and not every:
        yield "checkpoint.keep_best", "is found by validations, and train.validate_every is 0: there are none"
    elif best and isinstance(save, int) and isinstance(every, int) and save % every:
        why = "checkpoint.keep_best compares checkpoints by their validations"
        yield "checkpoint.save_every", f"{save} is no multiple of train.validate_every {every}, but {why}"
    if run.export.checkpoint == "best" and not best:
        yield "export.checkpoint", "best, but checkpoint.keep_best is false"
    if run.export.checkpoint == "best" and run.reinforce.steps:
        yield "export.checkpoint", f"best, but reinforce.steps {run.reinforce.steps} have no validations"
    steps, step = run.reinforce.steps or run.train.steps, run.export.checkpoint
    if isinstance(step, int) and steps is not None and step > steps:
        yield "export.checkpoint", f"{step} is after the last step, {steps}"
