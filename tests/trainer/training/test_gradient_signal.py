"""trainer/training/gradient_signal.py: gradients that are noise have no signal, and make no long steps."""

import json
from random import Random
from types import SimpleNamespace

import pytest
import torch

from conf.load import ConfigError, load
from trainer.training.gradient_signal import GradientSignal, cosine_of, products

BETA = 0.9


def heard(cosines, full: float = 3.0) -> GradientSignal:
    signal = GradientSignal(full)
    for cosine in cosines:
        signal.add(cosine)
    return signal


def test_the_signal_of_noise_has_a_deviation_of_1_whatever_the_size_of_cosines():
    draw = Random(1)
    for size in (1e-3, 0.5):
        found = [heard(draw.gauss(0, size) for _ in range(100)).value for _ in range(1000)]
        assert sum(found) / 1000 == pytest.approx(0, abs=0.15)
        assert sum(one**2 for one in found) / 1000 == pytest.approx(1, abs=0.15)
        assert sum(one > 3 for one in found) < 10


def test_steps_are_none_at_first_and_full_once_gradients_have_pointed_the_same_way():
    assert heard([]).length == 0 and heard([0.2]).length == 0
    lengths = [heard([0.2] * count).length for count in range(16)]
    assert lengths == sorted(lengths) and lengths[-1] == 1 and 0 < lengths[5] < 1
    assert heard([-0.2] * 16).length == 0
    assert heard([-0.2] * 16, full=0).length == 1  # nothing is asked of them


def test_a_third_of_what_is_asked_makes_no_step_and_two_thirds_a_half():
    signal = GradientSignal(3.0)
    for value, length in (1.0, 0.0), (2.0, 0.5), (3.0, 1.0), (9.0, 1.0):
        signal.resume({"sum": value, "squares": 1.0})
        assert signal.length == pytest.approx(length)
        optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}, {"lr": 2e-3}])
        signal.shorten(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3 * length, 2e-3 * length])


def test_the_mean_before_a_gradient_is_found_from_adam_s_mean_behind_it():
    torch.manual_seed(0)
    weight = torch.zeros(50, requires_grad=True)
    optimizer, before = torch.optim.AdamW([weight], lr=1e-3, betas=(BETA, 0.95)), torch.zeros(50)
    for step in range(5):
        weight.grad = torch.randn(50)
        optimizer.step()
        mean = optimizer.state[weight]["exp_avg"]
        expected = [weight.grad @ before, weight.grad @ weight.grad, before @ before]
        found = products(weight.grad, mean, BETA)
        torch.testing.assert_close(found.float(), torch.stack(expected), rtol=1e-4, atol=1e-5)
        assert (cosine_of(found) == 0) == (step == 0)  # what rounding leaves of nothing points nowhere
        before = mean.clone()


def test_a_start_after_a_crash_hears_on_where_it_was():
    draw = Random(2)
    cosines = [draw.gauss(0.1, 0.3) for _ in range(40)]
    whole, resumed = heard(cosines), GradientSignal(3.0)
    resumed.resume(json.loads(json.dumps(heard(cosines[:17]).state())))
    for cosine in cosines[17:]:
        resumed.add(cosine)
    assert resumed.state() == whole.state() and resumed.length == whole.length


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer.states=bf16", "optimizer.states bf16 keep it rounded"),
        ("optimizer.offload=0.5", "optimizer.offload 0.5 keeps it on the host"),
        ("optimizer.beta1=0", "optimizer.beta1 0 keeps no mean"),
    ],
)
def test_a_mean_that_cannot_be_read_is_told_before_anything_starts(override, reason):
    with pytest.raises(ConfigError, match=f"reinforce.signal: compares each gradient .*{reason}"):
        load("tiny-rl", ["reinforce.signal=3", override])
