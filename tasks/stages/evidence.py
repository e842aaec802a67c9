"""Evidence that one evaluation is better than another: row by row if possible, else by standard errors.

An evaluation keeps the scores of its rows in scores.json (trainer/evaluate.py). Scores of the same rows are compared in
pairs (conf/noise.py). Without pairs the standard errors decide, if both evaluations have them: for groups of tasks, for
other questions, and for older evaluations without scores. This test is weaker: the same gain needs more rows, because a
row that is hard for both models counts as noise.
"""

import json
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from conf import noise
from tasks.run.artifact import Artifact
from tasks.store import Store

Scores = list[list[float]]  # for each row: the sum of its values, and their number
SCORES = "scores.json"


@dataclass(frozen=True)
class Evidence:
    """Evidence for the gain of one evaluation over another."""

    shown: str  # the number of right rows; "" if rows are not right or wrong
    how: str  # the kind of comparison, or why there is none
    chance: float | None  # probability that equal models differ this much; None if not comparable


def compare(metric: str, before: Artifact | None, after: Artifact, store: Store, same_rows: bool) -> Evidence:
    """Return the evidence for the gain of `after` over `before`. `before` is None if this store has no record of it."""
    old, new = (_scores(one, metric, store) if one else None for one in (before, after))
    shown = ""
    if new and all(total in (0, 1) and count == 1 for total, count in new):  # rows are right or wrong
        shown = f"{sum(total for total, _ in new):.0f} of {len(new)}"
    if same_rows and old and new and [count for _, count in old] == [count for _, count in new]:
        gains = [now - was for (now, _), (was, _) in zip(new, old, strict=True)]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        return Evidence(shown, f"higher in {better} rows, lower in {worse}", noise.chance(gains))
    points = [_mean(old), _mean(new)] if old and new else [_reported(one, metric) for one in (before, after)]
    (was, one_error), (now, other_error) = points
    if one_error is None or other_error is None:
        return Evidence(shown, "both evaluations lack scores of rows or standard errors", None)
    error, gain = math.hypot(one_error, other_error), abs(now - was)
    chance = 1 - NormalDist().cdf(gain / error) if error else 0.0 if gain else 1.0
    return Evidence(shown, "by standard errors, as the rows differ or are unknown", chance)


def _scores(evaluation: Artifact, metric: str, store: Store) -> Scores | None:
    found = store.read(f"{evaluation.key}/files/{SCORES}") if SCORES in evaluation.files else None
    return json.loads(found[0]).get(metric) if found else None


def _mean(scores: Scores) -> tuple[float, float | None]:
    """Return the mean of all values and its standard error over rows (None for a single row)."""
    count, values = len(scores), math.fsum(count for _, count in scores)
    mean = math.fsum(total for total, _ in scores) / values
    apart = math.fsum((total - mean * count) ** 2 for total, count in scores)
    return mean, math.sqrt(apart * count / (count - 1)) / values if count > 1 else None


def _reported(evaluation: Artifact | None, metric: str) -> tuple[float, float | None]:
    """Return the metric and lm-eval's standard error, named task/acc_stderr or task/acc_stderr/FILTER."""
    task, name, *chosen = metric.split("/")
    found: dict[str, Any] = evaluation.result["metrics"] if evaluation else {}
    error = found.get("/".join([task, f"{name}_stderr", *chosen]))
    return found.get(metric, math.nan), error if isinstance(error, float) and math.isfinite(error) else None
