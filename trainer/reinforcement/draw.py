"""Draw the prompts of a step, and check that each prompt leaves room for an answer."""

from collections.abc import Iterable
from pathlib import Path
from random import Random

from conf.schema.run import Run
from contract.faults import Fault


def longest(run: Run) -> int:
    """Highest number of tokens of a prompt that leaves room for the longest answer."""
    return run.data.seq_length - run.reinforce.max_tokens


def require_fit(run: Run, lengths: Iterable[int], path: Path) -> None:
    """Raise a Fault if a row of the file has a prompt of too many tokens."""
    long = [(length, row) for row, length in enumerate(lengths, 1) if length > longest(run)]
    if not long:
        return
    length, row = long[0]
    others = f", and {len(long) - 1} more are too long; the longest has {max(long)[0]}" if len(long) > 1 else ""
    raise Fault(
        f"{path}:{row}: a prompt of {length} tokens{others}; data.seq_length {run.data.seq_length} less "
        f"reinforce.max_tokens {run.reinforce.max_tokens} leaves {longest(run)}"
    )


def of_turns(run: Run, step: int, round: int) -> Random:
    """Random generator of the seeds for later answers, if a round has several turns."""
    return Random(f"{run.reinforce.seed} {step} {round} turns")


def rows(run: Run, step: int, round: int, count: int, of: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows of a round of a step, and a seed for the answers to each."""
    draw = Random(f"{run.reinforce.seed} {step} {round}")
    chosen = draw.sample(range(of), count) if count <= of else draw.choices(range(of), k=count)
    return chosen, [draw.randrange(2**40) for _ in chosen]
