"""The CPU stand-in of Mamba-2's scan computes the recurrence, row by row."""

from unittest import mock

import pytest
import torch

from tests.trainer.startup.test_delta_rule import ENDS, drawn, gradients
from trainer.patches.families import nemotron_h
from trainer.startup.cpu.stand_in.fla.ops.simple_gla import chunk_simple_gla


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    state, outputs = 0, []
    for token in range(q.shape[1]):
        new = k[:, token, :, :, None] * v[:, token, :, None]
        state = g[:, token, :, None, None].exp() * state + new
        outputs.append((q[:, token, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 150])
def test_the_scan_is_the_recurrence(tokens):
    inputs = drawn(tokens)[:4]
    ours, theirs = chunk_simple_gla(*inputs, scale=1.0)[0], recurrence(*inputs)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    for one, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_packed_rows_are_as_alone_whatever_is_next_to_them():
    one, other = ([x[:1].detach() for x in drawn(200)[:4]] for _ in range(2))
    for mine, theirs in zip(one, other, strict=True):
        theirs[:, :7], theirs[:, 70:] = torch.rand_like(mine[:, :7]), -torch.rand_like(mine[:, 70:])
    row = slice(7, 70)
    packed = [chunk_simple_gla(*inputs, scale=1.0, cu_seqlens=torch.tensor(ENDS))[0] for inputs in (one, other)]
    alone, _ = chunk_simple_gla(*(x[:, row] for x in one), scale=1.0)
    assert torch.equal(packed[0][:, row], alone) and torch.equal(packed[1][:, row], alone)


def test_the_layer_of_transformers_needs_its_patch():
    """Its torch layer gives other values for the same row if a chunk is shorter than the row."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "hidden_size": 16}
    config = NemotronHConfig(**sizes, layers_block_type=["mamba"], chunk_size=16, use_mamba_kernels=False)
    torch.manual_seed(0)
    layer, row = NemotronHMamba2Mixer(config, 0), torch.randn(1, 60, 16)
    layer.dt_bias.data.fill_(-4)  # states last longer than a chunk

    def outputs(chunk: int) -> torch.Tensor:
        layer.chunk_size = chunk
        return layer(row).detach()

    with mock.patch.object(NemotronHMamba2Mixer, "torch_forward", usual(NemotronHMamba2Mixer)):
        assert (outputs(16) - outputs(64)).abs().max() > 1e-3
        nemotron_h.install()
        torch.testing.assert_close(outputs(16), outputs(64))


def usual(layer):
    """Return the method without the patch, which another test may have installed."""
    method = layer.torch_forward
    return method.__closure__[0].cell_contents if method.__name__ == "one_chunk" else method


@pytest.mark.gpu
def test_the_kernel_computes_the_sizes_of_releases():
    """A head has a state of 128 and 64 values."""
    from fla.ops.simple_gla import chunk_simple_gla as kernel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    shape = (1, 300, 8)
    q, k, v = (torch.randn(*shape, width, device="cuda") for width in (128, 128, 64))
    inputs = [x.bfloat16().requires_grad_() for x in (q / 11, k / 11, v)]
    inputs.append((-torch.rand(shape, device="cuda")).requires_grad_())
    ends = torch.tensor([0, 7, 70, 300], device="cuda")
    results = [rule(*inputs, scale=1.0, cu_seqlens=ends)[0].float() for rule in (kernel, chunk_simple_gla)]
    pairs = [results, *zip(*(gradients(result, inputs) for result in results), strict=True)]
    assert all((one - other).norm() / other.norm() < 0.01 for one, other in pairs)
