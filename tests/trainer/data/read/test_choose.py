import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema.data import Data, Part
from trainer.data.read.choose import SPLITS, chosen, copies, key, splits

ROWS = [{"input": f"question {n}", "output": f"answer {n % 7}"} for n in range(4000)]
KEYS = np.array([key(row) for row in ROWS], np.uint64)
NONE = np.zeros(len(KEYS), np.int16)


def data(**settings) -> Data:
    return Data(seq_length=64, source="some", **settings)


def test_a_row_is_known_by_its_content_alone():
    assert key({"input": "a", "output": "b"}) == key({"output": "b", "input": "a"})
    assert len({key({"input": "a", "output": "b"}), key({"input": "ab", "output": ""}), key({"text": "a"})}) == 3
    message = {"role": "user", "content": "a"}
    assert key({"messages": [message]}) == key({"messages": [dict(reversed(message.items()))]})


def test_splits_have_their_shares_and_do_not_move():
    found = splits(KEYS, data(validation=0.1, test=0.2))
    assert np.bincount(found) / len(KEYS) == pytest.approx([0.7, 0.1, 0.2], abs=0.02)
    assert (splits(KEYS[:100], data(validation=0.1, test=0.2)) == found[:100]).all()
    assert (splits(KEYS, data(validation=0, test=0)) == SPLITS.index("training")).all()


def test_a_limit_takes_the_same_rows_wherever_they_stand():
    some = chosen(KEYS, NONE, data(rows=500))
    assert some.sum() == 500
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(KEYS))
    assert {*KEYS[order][chosen(KEYS[order], NONE, data(rows=500))]} == {*KEYS[some]}
    assert {*KEYS[some]} < {*KEYS[chosen(KEYS, NONE, data(rows=600))]}, "more rows, and the same ones"
    assert {*KEYS[some]} != {*KEYS[chosen(KEYS, NONE, data(rows=500, rows_seed=1))]}
    assert chosen(KEYS, NONE, data(rows=9999)).all()


def test_a_limit_says_nothing_of_the_split():
    some = KEYS[chosen(KEYS, NONE, data(rows=1000))]
    assert (splits(some, data(validation=0, test=0.5)) == 2).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((1, 1), (1000, 1000)), ((3, 1), (3000, 1000)), ((1, 3), (333, 1000)), ((0.2, 0.8), (250, 1000))],
)
def test_a_mixture_has_its_weights_and_takes_no_row_twice(weights, counts):
    mixture = tuple(Part(source="x", weight=float(weight)) for weight in weights)
    parts = np.repeat(np.array([0, 1], np.int16), [3000, 1000])
    taken = chosen(KEYS, parts, Data(seq_length=64, mixture=mixture))
    assert tuple(np.bincount(parts[taken])) == counts
    limited = chosen(KEYS, parts, Data(seq_length=64, mixture=mixture, rows=100))
    assert np.bincount(parts[limited]) == pytest.approx(100 * np.array(weights) / sum(weights), abs=1)


def test_copies_are_left_out_before_rows_are_counted():
    doubled = np.concatenate([KEYS, KEYS])
    parts = np.zeros(len(doubled), np.int16)
    assert copies(doubled) == len(KEYS)
    assert (chosen(doubled, parts, data(duplicates="drop")) == np.repeat([True, False], len(KEYS))).all()
    assert len({*doubled[chosen(doubled, parts, data(duplicates="drop", rows=500))]}) == 500


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50), st.integers(1, 60))
def test_never_more_rows_than_asked_for(keys, rows):
    array = np.array(keys, np.uint64)
    assert chosen(array, np.zeros(len(keys), np.int16), data(rows=rows)).sum() == min(rows, len(keys))
