"""Logits of a policy in bf16 are not rounded, and its gradients are those of a product in bf16."""

import pytest
import torch

from trainer.reinforcement.policy.exact_logits import Product


@pytest.fixture
def rows():
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()


@pytest.fixture
def weight():
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()


def test_logits_are_exact_to_fp32(rows, weight):
    found = Product.apply(rows, weight)
    assert found.dtype == torch.float32
    exact = rows.double() @ weight.double().t()
    assert (found - exact).abs().max() <= 1e-6 * exact.abs().max()
    assert (rows @ weight.t() - exact).abs().max() > 1e-3 * exact.abs().max()  # bf16 alone


@pytest.mark.parametrize("frozen", ["", "rows", "weight"])
def test_gradients_are_those_of_a_product_in_bf16(frozen, rows, weight):
    given = {"rows": rows, "weight": weight}
    for name, tensor in given.items():
        tensor.requires_grad_(name != frozen)
    upstream = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    Product.apply(rows, weight).backward(upstream.float())
    mine = {name: tensor.grad for name, tensor in given.items()}
    for tensor in given.values():
        tensor.grad = None
    (rows @ weight.t()).backward(upstream)
    for name, tensor in given.items():
        if name == frozen:
            assert mine[name] is None
        else:
            assert mine[name].dtype == torch.bfloat16 and torch.equal(mine[name], tensor.grad)
