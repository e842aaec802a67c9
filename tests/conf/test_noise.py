"""conf/noise.py: chances of gains against counted and drawn ones, and the warning about too few rows."""

import random
from itertools import product

import pytest

from conf import noise
from conf.load import load


@pytest.mark.parametrize(
    ("better", "worse", "chance"), [(1, 0, 1 / 2), (5, 0, 1 / 32), (3, 1, 5 / 16), (0, 0, 1.0), (1, 3, 5 / 16)]
)
def test_rows_that_are_right_or_wrong_are_counted(better, worse, chance):
    assert noise.chance([1.0] * better + [-1.0] * worse + [0.0] * 90) == chance


def test_other_gains_get_random_signs():
    draw = random.Random(1)
    for shift in (0.0, 0.3, 1.0):
        gains = [draw.gauss(shift, 1.0) for _ in range(12)]
        drawn = product((1, -1), repeat=12)
        signed = [sum(gain * sign for gain, sign in zip(gains, signs, strict=True)) for signs in drawn]
        exact = sum(value >= abs(sum(gains)) - 1e-12 for value in signed) / 2**12
        assert noise.chance(gains) == pytest.approx(exact, abs=0.015)


def test_one_outlier_is_noise():
    assert noise.chance([100.0, *[0.01, -0.01] * 20]) > 0.2


@pytest.mark.parametrize(
    ("rows", "overrides", "says"),
    [
        (31, "", "about 31 held-out rows can show only a gain of 0.16 or more"),
        (31, "", "25 rows for 0.2, 50 rows for 0.1, 100 rows for 0.05: a larger data.test"),
        (900, "evaluate.rows=20", "about 20 held-out rows can show only a gain of 0.25 or more"),
        (900, "evaluate.rows=20", ": a larger evaluate.rows"),
        (4, "", "about 4 held-out rows can show no gain"),
        (
            4,
            "promote.metric=held_out/perplexity",
            "no gain of held_out/perplexity (promote.confidence 0.95); needed are at ",
        ),
        (64, "promote.confidence=0.999", "50 rows for 0.2, 100 rows for 0.1"),
    ],
)
def test_too_few_rows_are_warned_about(rows, overrides, says):
    assert says in noise.warning(load("tiny", overrides.split()), rows)


@pytest.mark.parametrize(
    ("rows", "overrides"),
    [
        (50, ""),
        (9, "promote.metric=held_out/perplexity"),
        (None, ""),
        (9, "promote.confidence=0"),
        (9, "evaluate.tasks=[arc] promote.metric=arc/acc"),
    ],
)
def test_enough_rows_or_none_that_are_known_are_not_warned_about(rows, overrides):
    assert noise.warning(load("tiny", overrides.split()), rows) == ""
