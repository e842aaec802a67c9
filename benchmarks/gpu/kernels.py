"""Kernels of norms, activations and FP8 on this host's GPU: correctness and time.

    benchmarks/gpu/run kernels.py OUT [--only SECTION ...]          a minute on one H200

    sums       a bias's gradient, and a norm's backward with the gradient of the residual, compared with torch's
    fp8        norms, GELU and its backward that write FP8, compared with Transformer Engine's quantization
    layers     a norm, a product, GELU, a product and the residual, with Transformer Engine's own ways and with ours
    tiles      microseconds with other tiles

Each line is a JSON object, which OUT/kernels.jsonl gets too. The exit code is 1 if numbers differ.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalOperand=false

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from calibrate import normal

ROWS, WIDTH, INNER = 32768, 1280, 5120  # GPT2-large's
REPEATS = 20  # in one graph, so that starting kernels takes no time


def us(function: Callable[[], Any]) -> float:
    """Microseconds of the GPU, without the host's."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) * 1e3 / REPEATS, 1)


def apart(found: Any, expected: Any) -> float:
    """The largest difference, as a part of the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def sums() -> Iterator[dict[str, Any]]:
    import torch

    from trainer.megatron.activations import kernel as activations
    from trainer.megatron.norms import kernel as norms

    x, past, gradient = (normal(ROWS, WIDTH) for _ in range(3))
    weight, bias = normal(WIDTH), normal(WIDTH)
    difference = apart(activations.column_sums(x), x.double().sum(0))
    took = us(lambda: activations.column_sums(x).to(x.dtype)), us(lambda: x.sum(0))
    yield {"name": "sums of columns", "us": took, "difference": difference, "same": difference < 1e-5}

    exact = x.double().requires_grad_()
    torch.nn.functional.layer_norm(exact, (WIDTH,), weight.double(), bias.double(), 1e-5).backward(gradient.double())
    _, means, spreads = norms.forward(x, weight, bias, 1e-5, False)
    given = gradient, x, means, spreads, weight, False
    found, *_ = norms.backward(*given, past=past)
    difference = apart(found, exact.grad + past.double())
    took = us(lambda: norms.backward(*given, past=past)), us(lambda: norms.backward(*given)[0] + past)
    yield {"name": "norm and residual", "us": took, "difference": difference, "same": difference < 1e-2}


def quantizer(kind: str = "kFloat8E4M3", scale: float = 20.0):
    import torch
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    found = Float8Quantizer(torch.tensor([scale]).cuda(), torch.zeros(1).cuda(), getattr(DType, kind))
    found.internal = True
    return found


def same(found: Any, expected: Any, of: Any, by: Any) -> dict[str, Any]:
    """Whether two quantized tensors are the same to the bit, and what their quantizers keep."""
    import torch

    pairs = (found._data, expected._data), (found._transpose, expected._transpose)
    differ = max(float((one != other).float().mean()) for one, other in pairs)
    turned = torch.equal(found._transpose.flatten(1).t(), found._data.flatten(0, -2))
    kept = torch.allclose(of.amax, by.amax, rtol=1e-2) and torch.equal(found._scale_inv, expected._scale_inv)
    # Sums in another order round a few bf16 numbers, and so their FP8 ones, to the other neighbour.
    return {"differ": differ, "same": differ < 1e-4 and turned and kept, "turned": turned, "kept": kept}


def fp8() -> Iterator[dict[str, Any]]:
    import transformer_engine.pytorch  # noqa: F401  loads what the next is a part of
    import transformer_engine_torch as engine

    from trainer.megatron import norms, quantized
    from trainer.megatron.activations import kernel as activations
    from trainer.megatron.norms import kernel as norms_kernel
    from trainer.megatron.quantized import kernel

    quantize = getattr(engine, "plain_quantize", engine.quantize)
    x, weight, bias = normal(ROWS, WIDTH), normal(WIDTH), normal(WIDTH)
    of, by = quantizer(), quantizer()
    ours = lambda: norms._forward(engine, x, weight, bias, 1e-5, of, False)[0]  # noqa: E731
    theirs = lambda: quantize(norms_kernel.forward(x, weight, bias, 1e-5, False)[0], by)  # noqa: E731
    yield {"name": "norm in FP8", "us": (us(ours), us(theirs)), **same(ours(), theirs(), of, by)}

    x, bias, gradient = normal(ROWS // 32, 32, INNER), normal(INNER), normal(ROWS // 32, 32, INNER)
    of, by = quantizer(), quantizer()
    ours = lambda: kernel.gelu(bias, x, quantized.Parts(of, x))  # noqa: E731
    theirs = lambda: quantize(activations.bias_gelu(bias, x), by)  # noqa: E731
    yield {"name": "GELU in FP8", "us": (us(ours), us(theirs)), **same(ours(), theirs(), of, by)}

    of, by = quantizer("kFloat8E5M2", 300.0), quantizer("kFloat8E5M2", 300.0)
    ours = lambda: kernel.gelu_back(gradient, bias, x, quantized.Parts(of, x))  # noqa: E731
    theirs = lambda: quantize(activations.bias_gelu_back(gradient, bias, x)[0], by)  # noqa: E731
    found, of_bias = ours()
    row = same(found, theirs(), of, by) | {"of_bias": apart(of_bias, activations.bias_gelu_back(gradient, bias, x)[1])}
    yield {"name": "GELU's backward in FP8", "us": (us(ours), us(theirs)), **row}


def layers() -> Iterator[dict[str, Any]]:
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    from trainer.startup import device

    device.start()
    from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu
    from transformer_engine.pytorch.module import layernorm_linear

    from trainer.megatron import activations, norms, quantized

    plain = layernorm_linear._LayerNormLinear
    activations.install()
    norms.install()
    quantized.install()
    split = layernorm_linear._LayerNormLinear
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")

    def steps(function, context) -> list:
        """The output and all gradients of the fourth step, when scales have settled."""
        layernorm_linear._LayerNormLinear = function
        torch.manual_seed(0)
        first = te.LayerNormLinear(WIDTH, INNER, bias=False, params_dtype=torch.bfloat16)
        second = te.Linear(INNER, WIDTH, bias=False, params_dtype=torch.bfloat16)
        biases = [normal(INNER, grad=True), normal(WIDTH, grad=True)]
        given, gradient = normal(1024, 8, WIDTH, grad=True), normal(1024, 8, WIDTH) * 1e-3
        found = []
        for _ in range(4):
            start = given * 1.0
            with context():
                inner = fused_bias_gelu.GeLUFunction.apply(first(start), biases[0])
                out = fused_bias_dropout.bias_dropout_add_fused_train((second(inner), biases[1]), start, 0.0)
            leaves = [given, *first.parameters(), *second.parameters(), *biases]
            found = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
        return found

    in_fp8 = lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # noqa: E731
    for name, context in (("bf16", contextlib.nullcontext), ("FP8", in_fp8)):
        expected, found = steps(plain, context), steps(split, context)
        differences = [apart(one, other) for one, other in zip(found, expected, strict=True)]
        yield {"name": f"layers in {name}", "differences": differences, "same": max(differences) < 2e-2}


def tiles() -> Iterator[dict[str, Any]]:
    from trainer.megatron import quantized
    from trainer.megatron.norms import kernel as norms
    from trainer.megatron.quantized import kernel

    x, past, gradient, weight, bias = (*(normal(ROWS, WIDTH) for _ in range(3)), normal(WIDTH), normal(WIDTH))
    _, means, spreads = norms.forward(x, weight, bias, 1e-5, False)
    found = {}
    for norms.PROGRAMS, norms.AHEAD in itertools.product((2, 3, 4), (1, 2, 3, 4)):
        for norms.BACKWARD in ((4096, 8), (2048, 4), (2048, 8)):
            key = f"{norms.PROGRAMS} {norms.AHEAD} {norms.BACKWARD}"
            found[key] = us(lambda: norms.backward(gradient, x, means, spreads, weight, False, past=past))
    yield {"name": "norm and residual", "us": found}
    found = {}
    for norms.FORWARD in ((8192, 8), (4096, 4), (4096, 8), (2048, 4), (2048, 2)):
        whole, half = (lambda n=n: norms.forward(x, weight, bias, 1e-5, False, normed=n) for n in (True, False))
        found[str(norms.FORWARD)] = us(whole), us(half)
    yield {"name": "norm, whole and means alone", "us": found}

    wide, inner, back = normal(ROWS, INNER), normal(INNER), normal(ROWS, INNER)
    of, again = quantizer(), quantizer("kFloat8E5M2", 300.0)
    found = {}
    shapes = ((64, 128), (128, 64), (64, 64), (32, 128), (32, 64), (128, 32))
    for tile, kernel.WARPS in itertools.product(shapes, (2, 4, 8)):
        kernel.NORM = kernel.GELU = kernel.BACK = tile
        found[f"{tile}, {kernel.WARPS}"] = (
            us(lambda: kernel.norm(x, weight, bias, means, spreads, False, quantized.Parts(of, x))),
            us(lambda: kernel.gelu(inner, wide, quantized.Parts(of, wide))),
            us(lambda: kernel.gelu_back(back, inner, wide, quantized.Parts(again, wide))),
        )
    yield {"name": "norm, GELU and its backward in FP8", "us": found}


SECTIONS = {"sums": sums, "fp8": fp8, "layers": layers, "tiles": tiles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of the results (default $OUT or runs/gpu)")
    parser.add_argument("--only", nargs="*", default=[*SECTIONS], choices=[*SECTIONS], metavar="SECTION")
    options = parser.parse_args()
    out = options.out or Path(os.environ.get("OUT", "runs/gpu"))
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    with (out / "kernels.jsonl").open("a") as lines:
        for section in options.only:
            try:
                for row in SECTIONS[section]():
                    failed |= row.get("same") is False
                    print(line := json.dumps(row), flush=True)
                    print(line, file=lines, flush=True)
            except Exception as error:  # a section that fails is a finding, and the next goes on
                failed = True
                told = {"name": section, "failed": f"{type(error).__name__}: {error}"[:1500]}
                print(line := json.dumps(told), flush=True)
                print(line, file=lines, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
