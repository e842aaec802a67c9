"""Matrix products, grouped ones and those in FP8, and the time of quantizing: a section of calibrate.py."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

from calibrate import EXPERTS, HIDDEN, INNER, TOKENS, host_us, ms, normal, tried

RECIPES = ("bf16", "current", "delayed", "blockwise")


def recipe(name: str):
    from transformer_engine.common import recipe as recipes

    kinds = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling", "blockwise": "Float8BlockScaling"}
    return getattr(recipes, kinds[name])()


def products() -> None:
    import torch
    from transformer_engine.pytorch import Float8BlockQuantizer, Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    for n in (2048, 4096, 8192, 16384):
        tried(f"gemm {n}", gemm, n, n, n)
    # GLM-4.7's qkv, dense fc1 and fc2; GPT2-large's; an adapter's A and B; the router
    for shape in ((8192, 14336, 5120), (8192, 24576, 5120), (8192, 5120, 12288), (32768, 5120, 1280)):
        tried("gemm {} {} {}".format(*shape), gemm, *shape)
    for shape in ((8192, 128, 5120), (8192, 5120, 128), (65536, 128, 5120), (65536, 3072, 128)):
        tried("gemm {} {} {}".format(*shape), gemm, *shape)
    tried("gemm fp32 router", gemm, TOKENS, EXPERTS, HIDDEN, "float32")
    for n in (2048, 4096, 8192, 16384):
        tried(f"gemm fp8 {n}", scaled, n)
    for name in RECIPES:
        for m, k, n in ((8192, 4096, 4096), (8192, 8192, 8192), (32768, 1280, 5120)):
            tried(f"linear {name} {m} {n} {k}", linear, name, m, k, n)
    for name in RECIPES:
        for k, n in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
            tried(f"grouped {name} {n} {k}", grouped, name, k, n)
    e4m3 = DType.kFloat8E4M3
    for name, make in {
        "current": lambda **ways: Float8CurrentScalingQuantizer(e4m3, torch.device("cuda"), **ways),
        "block of activations": lambda **ways: Float8BlockQuantizer(e4m3, block_scaling_dim=1, **ways),
        "block of weights": lambda **ways: Float8BlockQuantizer(e4m3, block_scaling_dim=2, **ways),
    }.items():
        for columnwise in (False, True):
            tried(f"quantize {name}{' both ways' * columnwise}", quantize, make, columnwise)


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16") -> dict[str, Any]:
    a, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype).t()
    took = ms(lambda: a @ b)
    return {"ms": took, "tflops": 2 * m * n * k / took / 1e9}


def scaled(n: int) -> dict[str, Any]:
    """Measure products of operands that are in FP8 already."""
    import torch

    a, b = (normal(n, n).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    took = ms(lambda: torch.ops.aten._scaled_mm(a, b.t(), one, one, None, None, torch.bfloat16, False))
    return {"ms": took, "tflops": 2 * n**3 / took / 1e9}


def linear(name: str, m: int, k: int, n: int) -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te

    layer = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16)
    return passes(name, layer, (normal(m, k, grad=True),), [layer.weight], 2 * m * n * k)


def grouped(name: str, k: int, n: int) -> dict[str, Any]:
    """Measure 8 of 160 experts for each of 8192 tokens, evenly; FP8 wants a multiple of 16 for each."""
    import torch
    import transformer_engine.pytorch as te

    each = -(-TOKENS * 8 // EXPERTS // 16) * 16
    layer = te.GroupedLinear(EXPERTS, k, n, bias=False, params_dtype=torch.bfloat16)
    rows = normal(each * EXPERTS, k, grad=True)
    return passes(name, layer, (rows, [each] * EXPERTS), list(layer.parameters()), 2 * each * EXPERTS * n * k)


def passes(name: str, layer, inputs: tuple, weights: list, flops: int) -> dict[str, Any]:
    """Milliseconds forward and backward, and bytes kept for backward.

    Forward is measured with weights quantized before or now, backward with trained and with frozen ones.
    """
    import torch
    import transformer_engine.pytorch as te

    low = name != "bf16"
    again = {"is_first_microbatch": False} if low else {}

    def forward(**more):
        with te.autocast(enabled=low, recipe=recipe(name) if low else None):
            return layer(*inputs, **more)

    out: list[Any] = []

    def fresh() -> None:
        out[:] = [forward(**again)]
        for tensor in (inputs[0], *weights):
            tensor.grad = None

    before = torch.cuda.memory_allocated()
    if low:
        forward(is_first_microbatch=True)
    kept = torch.cuda.memory_allocated() - before
    found = {"forward": ms(lambda: forward(**again)), "forward_anew": ms(forward) if low else 0.0, "kept_bytes": kept}
    gradient = torch.randn_like(forward(**again))
    found["backward"] = ms(lambda: out[0].backward(gradient), before=fresh)
    found["host_us"] = host_us(lambda: forward(**again), 10)
    for weight in weights:
        weight.requires_grad_(False)
        weight.grad = None
    found["backward_frozen"] = ms(lambda: out[0].backward(gradient), before=fresh)
    out[:] = []
    before = torch.cuda.memory_allocated()
    result = forward(**again)
    found["kept_frozen_bytes"] = torch.cuda.memory_allocated() - before - result.numel() * 2
    return found | {"tflops": flops / found["forward"] / 1e9}


def quantize(make: Callable, columnwise: bool) -> dict[str, Any]:
    whole, small = normal(TOKENS * 8, HIDDEN), normal(128, 512)
    quantizer = make(rowwise=True, columnwise=columnwise)
    took = ms(lambda: quantizer(whole))
    # read once in bf16, written once or twice in FP8
    return {
        "ms": took,
        "GB/s": whole.numel() * (3 + columnwise) / took / 1e6,
        "host_us": host_us(lambda: quantizer(small)),
    }
