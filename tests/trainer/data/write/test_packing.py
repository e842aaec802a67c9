"""Every row is in one pack, no pack holds too much, and packs are as full as Megatron-Bridge's."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.load import load
from contract.faults import Fault
from trainer.data.write import packing

RANDOM = np.random.default_rng(7)
LENGTHS = {
    "lognormal": np.clip(RANDOM.lognormal(5, 1, 20000), 1, 4096).astype(np.int64),
    "uniform": RANDOM.integers(1, 4097, 20000),
    "long": RANDOM.integers(1400, 2800, 20000),
    "two lengths": np.where(RANDOM.random(20000) < 0.3, 2500, 300),
    "multiples of 16": packing.padded(np.clip(RANDOM.lognormal(6, 1, 20000), 2, 4097).astype(np.int64), 16),
    "one length": np.full(5000, 700),
    "whole packs": np.full(100, 4096),
}


def fits(lengths: np.ndarray, order: np.ndarray, bounds: np.ndarray, capacity: int) -> bool:
    """Each row once; no pack empty, none too full."""
    whole = np.array_equal(np.sort(order), np.arange(len(lengths))) and bounds[0] == 0 and bounds[-1] == len(order)
    sums = np.add.reduceat(lengths[order], bounds[:-1]) if len(order) else np.zeros(0)
    return bool(whole and (np.diff(bounds) > 0).all() and (sums <= capacity).all())


@given(st.integers(1, 60).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
@settings(deadline=None)
def test_any_lengths(drawn):
    capacity, lengths = drawn[0], np.array(drawn[1], np.int64)
    order, bounds = packing.assign(lengths, capacity, 1)
    assert fits(lengths, order, bounds, capacity)
    assert len(bounds) - 1 == best_fit_decreasing(lengths, capacity)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """The number of packs, row by row."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            rooms.append(capacity - length)
        else:
            rooms[rooms.index(room)] -= length
    return len(rooms)


@pytest.mark.parametrize("name", LENGTHS)
def test_packs_are_as_full_as_bridge_s(name, tmp_path, as_bridge):
    lengths = LENGTHS[name]
    order, bounds = packing.assign(lengths, 4096, 1)
    assert fits(lengths, order, bounds, 4096)
    np.save(tmp_path / "lengths.npy", lengths)
    assert len(bounds) - 1 <= as_bridge(tmp_path, "packs", lengths="lengths.npy", capacity=4096)


def test_the_seed_decides_rows_and_order():
    lengths = LENGTHS["lognormal"]
    first, again, other = (packing.assign(lengths, 4096, seed) for seed in (1, 1, 2))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert len(first[1]) == len(other[1])
    assert not np.array_equal(first[0], other[0])
    firsts = lengths[first[0]][first[1][:-1]]
    assert abs(np.corrcoef(np.arange(len(firsts)), firsts)[0, 1]) < 0.2  # long and short ones everywhere


def test_a_row_that_does_not_fit_is_a_defect():
    for lengths in ([5, 11], [0, 3]):
        with pytest.raises(AssertionError):
            packing.assign(np.array(lengths), 10, 1)


@pytest.mark.parametrize("capacity", [8192, 131072])
def test_half_a_million_rows_in_a_second_or_so(capacity):
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 500_000), 1, capacity).astype(np.int32)
    started = time.monotonic()
    order, bounds = packing.assign(lengths, capacity, 1)
    assert time.monotonic() - started < 5
    assert fits(lengths.astype(np.int64), order, bounds, capacity)
    assert lengths.sum() / (len(bounds) - 1) / capacity > 0.999


def test_what_counts_against_a_pack():
    assert packing.padded(np.array([2, 17, 18, 33]), 16).tolist() == [16, 16, 32, 32]


@pytest.mark.parametrize(
    "layout, expected", [([], 16), (["cp=2"], 16), (["cp=3"], 48), (["tp=8", "sp=true", "cp=4"], 64), (["tp=8"], 16)]
)
def test_a_packed_row_divides_over_the_layout(layout, expected):
    run = load("tiny")
    settings = {key: json.loads(value) for key, value in (pair.split("=") for pair in layout)}
    run = run.model_copy(update={"layout": run.layout.model_copy(update=settings)})
    assert packing.multiple(run) == expected


def test_a_sequence_that_packed_rows_cannot_fill():
    run = load("tiny", ["data.packed=true", "train.micro_batch=1", "data.seq_length=100"])
    with pytest.raises(Fault, match=r"^data.seq_length: 100 is not a multiple of 16, .*; nearest: 96, 112$"):
        packing.multiple(run)
    assert packing.multiple(load("tiny", ["data.seq_length=100"])) == 16
