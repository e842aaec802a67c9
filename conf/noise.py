"""Noise of an evaluation: the chance of a gain between equal models, and the rows that a gain needs.

    chance(gains) -> float       of paired differences: the new score of each row minus the old one
    warning(run, rows) -> str    about too few held-out rows; "" if they show a gain of NOTABLE

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
    """Probability that equal models differ at least as much, in the direction of the sum."""
    apart = [gain for gain in gains if gain]
    better = sum(gain > 0 for gain in apart)
    if len({abs(gain) for gain in apart}) < 2:
        count = max(better, len(apart) - better)
        return sum(comb(len(apart), k) for k in range(count, len(apart) + 1)) / 2 ** len(apart)
    sizes = [abs(gain) for gain in apart]
    # A sum with random signs reaches the true sum if the sizes with a plus reach `least`.
    least = (sum(sizes) + abs(sum(apart))) / 2 - 1e-9 * sum(sizes)
    draw = random.Random(0)
    signs = (map(int, f"{draw.getrandbits(len(sizes)):0{len(sizes)}b}") for _ in range(DRAWS))
    return (1 + sum(sum(compress(sizes, plus)) >= least for plus in signs)) / (1 + DRAWS)


def fewest(confidence: float) -> int:
    """Rows that must become right for a significant gain, if no row becomes wrong."""
    return ceil(-log2(1 - confidence))


def needed(gain: float, confidence: float) -> int:
    """Rows with which this gain in the share of right answers is significant, if no row becomes wrong."""
    return ceil(round(fewest(confidence) / gain, 9))


def warning(run: Run, rows: int | None) -> str:
    """Warning about too few held-out `rows` for the evaluation; "" if they are enough or their number is unknown."""
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
