"""What this host's GPU gives for the kernels that training is made of: the figures that conf/plan/ may take its from.

    tests/gpu/run calibrate.py OUT [--only SECTION ...]         2 to 3 minutes on one H200

    context      bytes of the device that are gone before a tensor is made, library by library
    products     TFLOPS of matrix products, grouped ones and those in FP8; what quantizing takes
    attention    TFLOPS of causal attention
    moved        bytes/s of kernels that only move data; the loss; the optimizer here and on the host; the bus
    layers       seconds of the host for one layer, forward and backward (layers.py)

None of it is a training run that the plan is compared with (plan.py). Each section is a process of its own, and what
fails in one is a line of text in OUT/calibrate.json. Times are medians; rates count each product's own FLOPs and each
kernel's own reads and writes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SECONDS = 100  # most that a section may take
RECIPES = ("bf16", "current", "delayed", "blockwise")
TOKENS, HIDDEN, INNER, EXPERTS, VOCAB = 8192, 5120, 1536, 160, 151552  # GLM-4.7's


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"name": what, **figures}), flush=True)


def tried(name: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    import torch

    try:
        say(name, **measure(*arguments))
    except Exception as error:  # a kernel that is not there is a finding, not an end
        say(name, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    torch.cuda.empty_cache()


def ms(function: Callable[[], Any], times: int = 8, warm: int = 3, before: Callable[[], Any] = lambda: None) -> float:
    """Of the device, between two events; what `before` does is not counted."""
    import torch

    found = []
    for i in range(warm + times):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= warm:
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def host_us(function: Callable[[], Any], times: int = 200) -> float:
    import torch

    function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times * 1e6


def normal(*shape: int, dtype: str = "bfloat16", grad: bool = False):
    """Random, as a product of zeros is faster."""
    import torch

    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)).requires_grad_(grad)


def context() -> None:
    import torch

    def gone(name: str) -> None:
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        say(name, bytes=whole - free - torch.cuda.memory_reserved(), whole=whole, reserved=torch.cuda.memory_reserved())

    gone("CUDA")
    torch.mm(normal(512, 512), normal(512, 512))
    gone("after cuBLAS")
    import transformer_engine.pytorch as te

    te.LayerNormLinear(512, 512, params_dtype=torch.bfloat16)(normal(512, 512)).sum().backward()
    gone("after Transformer Engine")
    q = normal(1024, 1, 8, 64, grad=True)
    te.DotProductAttention(8, 64)(q, q, q).sum().backward()
    gone("after attention")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29417", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(normal(2**26))
    gone("after NCCL")
    say("device", device=torch.cuda.get_device_name(), cores=os.cpu_count(), torch=torch.__version__)


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
    """Of operands that are in FP8 already."""
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
    """8 of 160 experts for each of 8192 tokens, evenly; FP8 wants a multiple of 16 for each."""
    import torch
    import transformer_engine.pytorch as te

    each = -(-TOKENS * 8 // EXPERTS // 16) * 16
    layer = te.GroupedLinear(EXPERTS, k, n, bias=False, params_dtype=torch.bfloat16)
    rows = normal(each * EXPERTS, k, grad=True)
    return passes(name, layer, (rows, [each] * EXPERTS), list(layer.parameters()), 2 * each * EXPERTS * n * k)


def passes(name: str, layer, inputs: tuple, weights: list, flops: int) -> dict[str, Any]:
    """ms forward, with weights quantized before or now; backward, trained and frozen; bytes kept for backward."""
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


def attention() -> None:
    for dim in (64, 128):
        for length in (1024, 4096, 8192, 32768):
            tried(f"attention {length} {dim}", attend, length, dim, dim)
    tried("attention 4096 192/128", attend, 4096, 192, 128)
    tried("attention 8192 128, 8 of 96", attend, 8192, 128, 128, 96, 8)


def attend(length: int, dim: int, value: int, heads: int = 16, groups: int = 16) -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te

    batch = max(1, 32768 // length // (heads // 16))
    q, k = (normal(length, batch, n, dim, grad=True) for n in (heads, groups))
    v = normal(length, batch, groups, value, grad=True)
    core = te.DotProductAttention(heads, dim if dim == value else (dim, value), num_gqa_groups=groups)
    flops = 2 * batch * heads * length**2 * (dim + value) / 2
    out: list[Any] = []

    def fresh() -> None:
        q.grad = k.grad = v.grad = None
        out[:] = [core(q, k, v)]

    forward, gradient = ms(lambda: core(q, k, v)), torch.randn_like(core(q, k, v))
    backward = ms(lambda: out[0].backward(gradient), before=fresh)
    rates = {"tflops": flops / forward / 1e9, "tflops_backward": 2.5 * flops / backward / 1e9}
    return {"forward": forward, "backward": backward, **rates}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder of calibrate.json; default: $OUT or .")
    parser.add_argument("--only", nargs="*", default=SECTIONS, choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or Path(os.environ.get("OUT", "."))
    return options


def main() -> None:
    options = arguments()
    if options.section:
        import layers
        import moved

        here = {"context": context, "products": products, "attention": attention}
        (here | {"moved": moved.moved, "layers": layers.layers})[options.section]()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for section in options.only:
        started = time.monotonic()
        command = [sys.executable, __file__, "--section", section]
        log = options.out / f"calibrate-{section}.txt"
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=SECONDS, cwd=ROOT
                )
                out, code = done.stdout, done.returncode
            except subprocess.TimeoutExpired as late:
                out, code = (late.stdout or b"").decode(), 124
        rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
        found[section] = {"exit": code, "seconds": round(time.monotonic() - started, 1), "rows": rows}
        (options.out / "calibrate.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{section}: exit code {code}, {found[section]['seconds']} s")
        for row in rows:
            figures = (
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print("   ", ", ".join(list(figures)[1:]).join([f"{row['name']}: ", ""]), flush=True)


SECTIONS = ("context", "products", "attention", "moved", "layers")

if __name__ == "__main__":
    main()
