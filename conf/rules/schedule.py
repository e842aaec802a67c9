"""Length of a training: steps from epochs and from shares of all steps, after the data are prepared.

    resolved(run, sequences) -> Run      all lengths as numbers of steps, for the trainer and for checkpoints
    wrong_steps(run)                     (key, problem), for conf/rules/contradictions.py
    assumed(run, sequences) -> Run       the same for a plan, from an estimate; train.epochs stays set

An epoch is the number of batches, rounded up, that contain all training sequences once; packed sequences contain
several rows. Shares are rounded up too. Decimal fractions are exact: 0.07 epochs of 100 sequences are 7 sequences.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Any

from conf.schema.run import Run
from conf.schema.sections import COUNTED
from contract.faults import Fault


def wrong_steps(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for numbers of steps that are wrong together: all that a resolved schedule can change."""
    train, warmup = run.train, run.optimizer.warmup_steps
    if train.stop_after is not None and train.steps is not None and train.stop_after > train.steps:
        yield "train.stop_after", f"{train.stop_after} is after the last step, {train.steps}"
    if train.steps is not None and warmup >= train.steps:
        yield "optimizer.warmup_steps", f"{warmup} leaves none of the {train.steps} steps for the decay"
    yield from _wrong_validations(run)


def _wrong_validations(run: Run) -> Iterator[tuple[str, str]]:
    """Rules of validations, which decide whether a training ends early, and which of its checkpoints is the best."""
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


def needs_data(run: Run) -> bool:
    """Whether the schedule depends on the number of training sequences."""
    return run.train.epochs is not None or "epoch" in (run.train.validate_every, run.checkpoint.save_every)


def sequences(run: Run, kind: str, rows: int, tokens: int) -> int:
    """Number of sequences of one epoch: the prepared rows, or those that the tokens of texts fill."""
    return max(1, tokens // run.data.seq_length) if kind == "text" else rows


def resolved(run: Run, sequences: int = 0) -> Run:
    """The run with all lengths as numbers of steps. `sequences` is the number of training sequences, if needed."""
    steps = _steps(run, sequences)
    epoch = ceil(sequences / run.train.global_batch)

    def interval(value: Any) -> int:
        return epoch if value == "epoch" else _share(value, steps) if isinstance(value, float) else value

    train = {"steps": steps, "epochs": None, "validate_every": interval(run.train.validate_every)}
    optimizer: dict[str, Any] = {}
    if run.optimizer.warmup is not None:
        optimizer = {"warmup": None, "warmup_steps": min(_share(run.optimizer.warmup, steps), steps - 1)}
    saved = {"save_every": interval(run.checkpoint.save_every)}
    result = run.changed(train=train, optimizer=optimizer, checkpoint=saved)
    origin = f" (train.epochs: {run.train.epochs:g} of {sequences} sequences)" if run.train.epochs is not None else ""
    if steps > COUNTED:
        raise Fault(f"train.epochs: {steps} steps are more than {COUNTED}{origin}")
    if origin and result.train.stop_after is not None:  # a rehearsal may be longer than the run
        result = result.changed(train={"stop_after": _least(result)})
    if problems := [f"{key}: {text}{origin}" for key, text in wrong_steps(result)]:
        raise Fault("\n".join(problems))
    return result


def of_steps(run: Run, steps: int) -> Run:
    """The run with only these steps, at its highest learning rate and without validation, to measure or rehearse it."""
    return run.changed(
        model={"adapter": None},
        train={"steps": steps, "epochs": None, "stop_after": None, "stop_after_worse": None, "validate_every": 0},
        optimizer={"warmup": None, "warmup_steps": 0},
        checkpoint={"save_every": steps, "keep_best": False},
    )


def assumed(run: Run, sequences: int | None) -> Run:
    """The run for a plan. Without an estimate of its sequences, the steps of its epochs stay unknown."""
    if run.train.epochs is None or sequences is None:
        return run
    return run.changed(train={"steps": _steps(run, sequences)})


def last_step(run: Run) -> int | None:
    """The last step of training; None while the steps of its epochs are unknown."""
    return None if run.train.steps is None else _least(run)


def is_over(run: Run, step: int, mark: dict[str, Any]) -> bool:
    """Whether a training ends with this checkpoint: at the last step, or after too many worse validations."""
    last, patience = last_step(run), run.train.stop_after_worse
    worse = mark.get("validations", {}).get("worse", 0)
    return (last is not None and step >= last) or (patience is not None and worse >= patience)


def saves(run: Run, step: int) -> bool:
    """Whether a resolved run keeps a checkpoint of this step until its planned end."""
    every, last, keep = run.checkpoint.save_every, last_step(run), run.checkpoint.keep
    assert isinstance(every, int) and last is not None
    later = ceil(last / every) - ceil(step / every)
    return step <= last and (step % every == 0 or step == last) and (keep is None or later < keep)


def saved(run: Run) -> int:
    """Number of checkpoints that the run writes; a lower bound while its steps are unknown."""
    every, steps, epochs = run.checkpoint.save_every, run.train.steps, run.train.epochs
    if every == "epoch":
        return ceil(epochs or 1)
    if isinstance(every, float):
        return ceil(steps / _share(every, steps)) if steps else min(ceil(1 / Fraction(str(every))), COUNTED)
    return ceil(steps / every) if steps else 1


def _steps(run: Run, sequences: int) -> int:
    if run.train.epochs is None:
        assert run.train.steps is not None, "conf/load.py requires steps or epochs"
        return run.train.steps
    return max(1, ceil(Fraction(str(run.train.epochs)) * sequences / run.train.global_batch))


def _least(run: Run) -> int:
    assert run.train.steps is not None
    return min(run.train.steps, run.train.stop_after or run.train.steps)


def _share(value: float, steps: int) -> int:
    return ceil(Fraction(str(value)) * steps)
