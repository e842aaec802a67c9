"""The probe's verdict, and tensors on their way."""

import math

import pytest
import torch

from contract.faults import Fault
from trainer.reinforcement import probe, wire
from trainer.reinforcement.probe import Differences

GIVEN = (4, 4)


def test_agreement_passes():
    probe.judge(Differences(2e-7, 3e-7), 1e-4, 0.08, GIVEN)
    probe.judge(Differences(2e-7, 3e-7), 1e-4, 1e-7, GIVEN)  # a step that changed nothing


@pytest.mark.parametrize(
    ("differences", "before", "versions", "said"),
    [
        (Differences(2e-7, 2e-7), None, (3, 4), "vLLM has weights of version 3, not of 4: they were not transferred"),
        (Differences(0.08, 0.09), 2e-7, GIVEN, "vLLM still computes with the version before"),
        (Differences(2e-7, 0.03), 0.08, GIVEN, "its prefix cache is of an older version"),
        (Differences(4.4, 4.1), 4.3, GIVEN, "weights were lost or changed on the way"),
        (Differences(math.nan, math.nan), None, GIVEN, "weights were lost or changed on the way"),
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


def test_tensors_arrive_as_they_were_sent(monkeypatch):
    monkeypatch.setattr(wire, "BUCKET", 24)
    found = {}
    for bucket in wire.buckets(iter(TENSORS.items())):
        found |= dict(wire.taken_apart([meta for meta, _ in bucket], wire.joined(bucket)))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("place", [0, 23, 24, 33, 37, 41])
def test_a_flipped_byte_is_found_and_its_tensor_named(place):
    (bucket,) = wire.buckets(iter(TENSORS.items()))
    joined = wire.joined(bucket)
    joined[place] ^= 1
    with pytest.raises(Fault, match=r"^transfer of weights: (a|b|scalar|c) is not what was sent: digest"):
        list(wire.taken_apart([meta for meta, _ in bucket], joined))
