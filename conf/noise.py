"""Noise of an evaluation: the chance of a gain between equal models, and the rows that a gain needs.

    chance(gains) -> float       for paired differences: the new score of each row minus the old score
    warning(run, rows) -> str    about too few held-out rows; "" if they can show a gain of NOTABLE

If both models are equal, each difference could also have the opposite sign (sign-flip test). Rows that are right or
wrong all differ by the same amount and are counted exactly: this is McNemar's test. Other differences get random signs,
DRAWS times, from a fixed seed. The test is one-sided.
"""

import random
from collections.abc import Sequence
from itertools import compress
from math import ceil, comb, log2

from conf.schema.run import Run

DRAWS = 10_000
NOTABLE = 0.1  # a gain that an evaluation should be able to show
HELD_OUT = "held_out/"  # prefix of metrics of the test split


def chance(gains: Sequence[float]) -> float:
    """Return the probability that equal models differ at least as much, in the direction of the sum."""
    differences = [gain for gain in gains if gain]
    better = sum(gain > 0 for gain in differences)
    if len({abs(gain) for gain in differences}) < 2:
        count = max(better, len(differences) - better)
        return sum(comb(len(differences), k) for k in range(count, len(differences) + 1)) / 2 ** len(differences)
    sizes = [abs(gain) for gain in differences]
    # A sum with random signs reaches the true sum if the sizes with a plus reach `least`.
    least = (sum(sizes) + abs(sum(differences))) / 2 - 1e-9 * sum(sizes)
    draw = random.Random(0)
    signs = (map(int, f"{draw.getrandbits(len(sizes)):0{len(sizes)}b}") for _ in range(DRAWS))
    return (1 + sum(sum(compress(sizes, plus)) >= least for plus in signs)) / (1 + DRAWS)


def fewest(confidence: float) -> int:
    """Return the rows that must become right for a significant gain, if no row becomes wrong."""
    return ceil(-log2(1 - confidence))


def needed(gain: float, confidence: float) -> int:
    """Return the rows that make this gain in the share of right answers significant, if no row becomes wrong."""
    return ceil(round(fewest(confidence) / gain, 9))


def warning(run: Run, rows: int | None) -> str:
    """Return a warning about too few held-out `rows` for the evaluation; "" if they are enough or unknown."""
    metric, confidence = run.promote.metric, run.promote.confidence
    if not (confidence and run.evaluate.tasks and metric.startswith(HELD_OUT)) or rows is None:
        return ""
    least, count = fewest(confidence), min(rows, run.evaluate.rows or rows)
    of_answers = metric == f"{HELD_OUT}exact_match"
    if count >= (needed(NOTABLE, confidence) if of_answers else least):
        return ""
    shown = f"only a gain of {least / count:.2g} or more" if count >= least else "no gain"
    enough = ", ".join(f"{needed(gain, confidence)} rows for {gain}" for gain in (0.2, NOTABLE, 0.05))
    larger = "evaluate.rows" if count < rows else "data.test"
    rows_show = f"about {count} held-out rows can show {shown} of {metric} (promote.confidence {confidence:g})"
    return f"warning: {rows_show}; needed are at least {enough if of_answers else least}: a larger {larger}"
