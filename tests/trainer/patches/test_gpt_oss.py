"""What gpt-oss's experts and positions are computed with: the numbers of megatron-core's own, in fewer kernels."""

import importlib.metadata
import sys
import types

import pytest
import torch

from trainer.patches.families import clamped_experts, scaled_positions

OFFSET, LIMIT = 1.0, 7.0


def text(file: str) -> str:
    return importlib.metadata.distribution("megatron-core").locate_file(file).read_text()


def as_core(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    gate, linear = gate.clamp(min=None, max=LIMIT), linear.clamp(min=-LIMIT, max=LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (linear + OFFSET) * weights


@pytest.fixture
def core(monkeypatch):
    """core(name, **functions): a module of megatron-core's with these functions alone."""

    def core(name: str, **functions):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, whole, types.ModuleType(whole))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[whole])
        vars(sys.modules[name]).update(functions)
        return sys.modules[name]

    return core


def test_the_clamped_activation_has_the_values_and_gradients_of_autograd_s():
    x = (torch.randn(64, 32, dtype=torch.float64) * 6).requires_grad_()
    weights = torch.rand(64, 1, dtype=torch.float64, requires_grad=True)
    assert (x.abs() > LIMIT).any()
    expected = as_core(x, weights)
    given = torch.randn_like(expected)
    expected.backward(given)
    with torch.no_grad():
        found = clamped_experts._activated(x, weights, OFFSET, LIMIT)
        of_x, of_weights = clamped_experts._gradients(given, x, weights, OFFSET, LIMIT)
    assert torch.allclose(found, expected)
    assert x.grad is not None and torch.allclose(of_x, x.grad)
    assert weights.grad is not None and torch.allclose(of_weights, weights.grad)


def test_other_activations_are_core_s(core):
    assert "linear_offset = torch.tensor(linear_offset, dtype=input.dtype" in text(
        "megatron/core/fusions/fused_bias_geglu.py"
    )
    experts = core(
        "megatron.core.transformer.moe.experts", weighted_bias_quick_geglu_impl=lambda *given: ("core", *given)
    )
    clamped_experts.install()
    first = experts.weighted_bias_quick_geglu_impl
    clamped_experts.install()
    assert experts.weighted_bias_quick_geglu_impl is first  # not patched twice
    assert first("x", None, "weights") == ("core", "x", None, "weights", False, 0.0, None)
    assert first("x", "bias", "weights", False, OFFSET, LIMIT)[0] == "core"


class Tensor:
    """What the patch asks of a tensor."""

    def __init__(self, width: int, is_cuda: bool = True):
        self.shape, self.is_cuda = (1, width), is_cuda

    def float(self):
        return self

    def __mul__(self, scale: float):
        return ("scaled", scale)


def test_what_is_scaled_is_turned_by_one_kernel_on_a_gpu_alone(core):
    assert 'f"mscale={mscale} is not supported by TE' in text("megatron/core/models/common/embeddings/rope_utils.py")
    rope_utils = core(
        "megatron.core.models.common.embeddings.rope_utils",
        _apply_rotary_pos_emb_bshd=lambda *given, **named: "core",
        fused_apply_rotary_pos_emb=lambda t, freqs: t,
    )
    scaled_positions.install()
    turn, given = rope_utils._apply_rotary_pos_emb_bshd, Tensor(64)
    assert turn(given, Tensor(64), mscale=1.25) == ("scaled", 1.25)
    assert turn(given, Tensor(64)) is given
    for other in (turn(Tensor(64, is_cuda=False), Tensor(64)), turn(given, Tensor(32)), turn(given, Tensor(64), True)):
        assert other == "core"
