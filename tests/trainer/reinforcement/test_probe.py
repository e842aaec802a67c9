"""The probe's verdict, and tensors on their way."""

import math

import pytest
import torch

from contract.faults import Fault
from trainer.reinforcement import probe
from trainer.reinforcement.transfer import wire

GIVEN = (4, 4)


def test_agreement_passes():
    probe.judge((2e-7, 3e-7), 1e-4, 0.08, GIVEN)
    probe.judge((2e-7, 3e-7), 1e-4, 1e-7, GIVEN)  # a step that changed nothing


@pytest.mark.parametrize(
    ("differences", "before", "versions", "said"),
    [
        ((2e-7, 2e-7), None, (3, 4), "vLLM has weights of version 3, not of 4: they were not transferred"),
        ((0.08, 0.09), 2e-7, GIVEN, "vLLM still computes with the previous version"),
        ((2e-7, 0.03), 0.08, GIVEN, "its prefix cache is of an older version"),
        ((4.4, 4.1), 4.3, GIVEN, "weights were lost or changed in the transfer"),
        ((math.nan, math.nan), None, GIVEN, "weights were lost or changed in the transfer"),
    ],
)
def test_a_fault_is_told_from_another(differences, before, versions, said):
    with pytest.raises(Fault, match=r"^probe: ") as fault:
        probe.judge(differences, 1e-4, before, versions)
    assert said in str(fault.value) and "\n" not in str(fault.value)


def test_rows_are_longer_than_blocks_of_a_cache_and_fixed():
    rows = probe.rows([[1, 2, 3], [4, 5]], 3, 20)
    assert [len(row) for row in rows] == [20] * 3
    assert rows[0][:6] == [1, 2, 3, 4, 5, 1] and rows == probe.rows([[1, 2, 3], [4, 5]], 3, 20)


TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "c": torch.arange(4, dtype=torch.uint8),
}


def host(size: int) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)  # memory that was used before


@pytest.mark.parametrize("size", [wire.ROW, 3 * wire.ROW, wire.BUCKET])
def test_tensors_arrive_as_they_were_sent(size):
    found = {}
    for bucket in wire.buckets(TENSORS.items(), host, size):
        found |= dict(wire.taken_apart(bucket.metas, bucket.bytes.clone()))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_bucket_is_read_while_the_next_is_filled():
    found, before = [], None
    for bucket in wire.buckets(TENSORS.items(), host, wire.ROW):
        if before:  # is still what it was, with the next one there
            found += wire.taken_apart(before.metas, before.bytes.clone())
        before = bucket
    assert [name for name, _ in found] == [*TENSORS][:-1]


def test_a_tensor_that_is_larger_than_a_bucket_goes_whole():
    large = torch.arange(3 * wire.ROW, dtype=torch.int32)
    given = {"first": torch.ones(3), "large": large, "last": torch.ones(2)}
    sent = list(wire.buckets(given.items(), host, wire.ROW))
    assert [[one.name for one in bucket.metas] for bucket in sent] == [["first"], ["large"], ["last"]]


def test_a_tensor_that_does_not_lie_in_one_piece_is_sent_as_it_is():
    (bucket,) = wire.buckets([("turned", TENSORS["a"].T)], host, wire.BUCKET)
    ((_, found),) = wire.taken_apart(bucket.metas, bucket.bytes)
    assert torch.equal(found, TENSORS["a"].T)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("place", [0, 1, 23, 5000, wire.ROW - 1])
def test_a_flipped_bit_is_found_and_its_tensor_named(row, place):
    (bucket,) = wire.buckets(TENSORS.items(), host, wire.BUCKET)
    bucket.memory[row * wire.ROW + place] ^= 128
    with pytest.raises(Fault, match=f"^transfer of weights: {[*TENSORS][row]} is not what was sent: digest"):
        wire.taken_apart(bucket.metas, bucket.bytes)


def test_tensors_that_have_changed_places_are_found():
    (bucket,) = wire.buckets([("one", torch.ones(4)), ("other", torch.zeros(4))], host, wire.BUCKET)
    swapped = bucket.bytes.view(2, wire.ROW).flip(0).flatten()
    with pytest.raises(Fault, match=r"^transfer of weights: one is not what was sent"):
        wire.taken_apart(bucket.metas, swapped)
