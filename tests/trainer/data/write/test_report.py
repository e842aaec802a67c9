"""trainer/data/write/report.py: warnings about packed sequences that are not full."""

import numpy as np
import pytest

from trainer.data.write import packing, report

EMPTY = {
    "rows": {"read": 1, "kept": 1},
    "dropped": {},
    "truncated": {"share": 0},
    "overlap": {"exact": 0, "near": 0},
    "duplicates": {"exact": 0, "near": 0},
    "anomalies": {},
    "template": {"kind": "text"},
}


def warned(length: int, count: int, capacity: int, multiple: int = 16) -> list[str]:
    lengths = np.full(count, length)
    padded = packing.padded(lengths, multiple)
    _, bounds = packing.assign(padded, capacity, seed=0)
    made = {"training": report.packing(lengths, padded, bounds, capacity, multiple)}
    return report.warnings(EMPTY | {"packing": made, "tokens": {"training": report.lengths(lengths, lengths)}})


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((10, 80, 64), "only 56% full: 44% pads each row (about 10 tokens) to a multiple of 16, 0% is too small"),
        ((10, 80, 64), "joining several short rows into one needs less padding"),
        ((10, 80, 64, 32), "padding, or a smaller layout.cp or layout.tp"),
        ((41, 9, 64), "only 62% full: 12% pads each row (about 41 tokens) to a multiple of 16, 25% is too small"),
        ((41, 9, 64), "another data.seq_length leaves less"),
    ],
)
def test_sequences_that_are_not_full_are_explained(rows, says):
    (said,) = warned(*rows)
    assert says in said


def test_full_sequences_are_not_warned_about():
    assert warned(17, 80, 64) == []
