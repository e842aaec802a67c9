"""conf/rules/batch_ramp.py: how many sequences the first steps have, where batches grow."""

import pytest

from conf.load import load
from conf.rules import batch_ramp
from contract.faults import ConfigError


def ramp(first: int, added: int, sequences: int):
    keys = [f"train.ramp_from={first}", f"train.ramp_by={added}", f"train.ramp_sequences={sequences}"]
    return load("tiny-pretrain", [*keys, "train.micro_batch=2"]).train


def by_hand(first: int, added: int, samples: int, batch: int, steps: int) -> int:
    """Megatron-LM's own rule, step by step."""
    done, every = 0, samples / ((batch - first) // added)
    for _ in range(steps):
        done += batch if done > samples else first + int(done / every) * added
    return done


@pytest.mark.parametrize("samples", [4, 30, 64, 100])
def test_sequences_of_steps_are_megatron_s(samples):
    train = ramp(4, 4, samples)
    for steps in (0, 1, 2, 5, 9, 40):
        assert batch_ramp.sequences(train, steps) == by_hand(4, 4, samples, 16, steps), steps
    assert batch_ramp.sizes(train)[0] == (0, 4) and batch_ramp.sizes(train)[-1] == (samples, 16)


def test_without_a_ramp_every_batch_is_whole():
    train = load("tiny-pretrain").train
    assert batch_ramp.sequences(train, 7) == 7 * train.global_batch
    assert batch_ramp.whole_batches(train, 7) == 7


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((16, 4, 64), "train.ramp_from: 16, but train.global_batch is 16: it must be smaller"),
        ((4, 5, 64), "train.ramp_from: 4 and steps of 5 (train.ramp_by) do not reach train.global_batch 16"),
        ((4, 4, 2), "train.ramp_sequences: 2, but batches grow 3 times: at least 3"),
        ((3, 1, 64), "train.ramp_from: 3 is not a multiple of micro_batch 2 * dp 1 = 2"),
    ],
)
def test_a_ramp_that_cannot_be_is_said_in_a_line(value, said):
    with pytest.raises(ConfigError) as error:
        ramp(*value)
    assert said in str(error.value)
