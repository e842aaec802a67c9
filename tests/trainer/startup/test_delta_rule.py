"""The CPU stand-in of gated delta nets computes what transformers' torch versions do, row by row."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from trainer.startup.cpu.stand_in.fla.modules.convolution import causal_conv1d
from trainer.startup.cpu.stand_in.fla.modules.l2norm import l2norm
from trainer.startup.cpu.stand_in.fla.ops.gated_delta_rule import chunk_gated_delta_rule

ENDS = [0, 7, 7, 70, 200, 200]  # a list of packed rows is filled up with empty ones


def drawn(tokens: int, heads: int = 3, key: int = 16, value: int = 24) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    q, k = (l2norm(torch.randn(2, tokens, heads, key)) for _ in range(2))
    v, g, beta = torch.randn(2, tokens, heads, value), -torch.rand(2, tokens, heads), torch.rand(2, tokens, heads)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return list(torch.autograd.grad((output * weight).sum(), inputs))


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 150])
def test_the_rule_is_transformers(tokens):
    inputs = drawn(tokens)
    q, k, v, g, beta = inputs
    ours, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    for reference in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        theirs, _ = getattr(modeling_qwen3_next, reference)(
            q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False
        )
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    for one, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_packed_rows_are_as_alone_whatever_is_next_to_them():
    cut, mixed = torch.tensor(ENDS), torch.randn(1, 200, 12)
    one, other = ([x[:1].detach() for x in drawn(200)] for _ in range(2))
    for mine, theirs in zip(one, other, strict=True):
        theirs[:, :7], theirs[:, 70:] = torch.rand_like(mine[:, :7]), -torch.rand_like(mine[:, 70:])
    kernel = torch.randn(12, 4)
    row = slice(7, 70)
    packed = [chunk_gated_delta_rule(q, k, v, g=g, beta=b, cu_seqlens=cut)[0] for q, k, v, g, b in (one, other)]
    alone, _ = chunk_gated_delta_rule(*(x[:, row] for x in one))
    assert torch.equal(packed[0][:, row], alone) and torch.equal(packed[1][:, row], alone)
    convolved, _ = causal_conv1d(mixed, kernel, activation="silu", cu_seqlens=cut)
    assert torch.equal(convolved[:, row], causal_conv1d(mixed[:, row], kernel, activation="silu")[0])


def test_the_convolution_sees_this_token_and_those_before():
    x, kernel = torch.randn(1, 9, 2), torch.randn(2, 4)
    mixed, _ = causal_conv1d(x, kernel)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    expected = sum(kernel[:, i] * padded[:, i : i + 9] for i in range(4))
    torch.testing.assert_close(mixed, expected)
