"""trainer/patches/families/delta_kernels.py: which heads the kernels compute, and with which configuration."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from trainer.patches.families import delta_kernels


@pytest.mark.parametrize(
    "key, value, dtype, kernel",
    [
        (128, 128, torch.bfloat16, True),
        (32, 128, torch.bfloat16, False),
        (128, 64, torch.bfloat16, False),
        (128, 128, torch.float32, False),
    ],
)
def test_the_kernel_computes_only_the_heads_of_releases(key, value, dtype, kernel):
    q, k = (torch.nn.functional.normalize(torch.randn(1, 9, 2, key), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = torch.randn(1, 9, 2, value, dtype=dtype), -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
    rule = delta_kernels.by_size(lambda q, k, v, **more: ("kernel", None))
    output, _ = rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, cu_seqlens=None)
    assert (output == "kernel") if kernel else (output.shape == v.shape and output.dtype == dtype)


def test_each_kernel_keeps_one_configuration(monkeypatch):
    """Decorators are around the tuned function, as in the package."""

    def config(warps: int, stages: int, **blocks: int | str) -> SimpleNamespace:
        return SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=blocks)

    tuned = SimpleNamespace(
        configs=[config(8, 3, BV=32), config(4, 4, BV=32), config(4, 3, BV=64), config(4, 3, BV=32, P="ieee")], fn=None
    )
    module = ModuleType("fla.made_by_this_test")
    vars(module)["kernel"] = SimpleNamespace(fn=tuned)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    delta_kernels.choose_configurations()
    assert tuned.configs == [config(4, 3, BV=32, P="ieee")]
