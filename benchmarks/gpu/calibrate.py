"""Rates of this host's GPU in the kernels of training, from which conf/planner/ takes its figures.

    benchmarks/gpu/run calibrate.py OUT [--only SECTION ...]         2 to 3 minutes on one H200

    context      bytes of the device in use before the first tensor, by library
    products     TFLOPS of single, grouped and FP8 matrix products; time of quantizing (products.py)
    attention    TFLOPS of causal attention
    moved        bytes/s of kernels that only move data; loss, optimizer here and on the host, the bus (moved.py)
    layers       seconds of the host for one layer, forward and backward (layers.py)

plan.py compares the plan with training runs, which are not part of this. Each section is a separate process; a failure
is a line of text in OUT/calibrate.json. Times are medians; rates count each product's own FLOPs and each
kernel's own reads and writes.
"""

# pyright: reportMissingImports=false

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
SECONDS = 120  # limit of a section
TOKENS, HIDDEN, INNER, EXPERTS, VOCAB = 8192, 5120, 1536, 160, 151552  # GLM-4.7's


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"name": what, **figures}), flush=True)


def tried(name: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    import torch

    try:
        say(name, **measure(*arguments))
    except Exception as error:  # a missing kernel is a result, not the end
        say(name, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    torch.cuda.empty_cache()


def ms(function: Callable[[], Any], times: int = 8, warm: int = 3, before: Callable[[], Any] = lambda: None) -> float:
    """Milliseconds of the device, between two events. The work of `before` does not count."""
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
    """Random numbers: a product of zeros is faster."""
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
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of calibrate.json (default $OUT or runs/gpu)")
    parser.add_argument("--only", nargs="*", default=SECTIONS, choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or Path(os.environ.get("OUT", "runs/gpu"))
    return options


def main() -> None:
    options = arguments()
    if options.section:
        import torch

        if not torch.cuda.device_count():
            sys.exit("no GPU here that torch can use")
        import layers
        import moved
        import products

        here = {"context": context, "attention": attention, "products": products.products}
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
                out, code = bytes(late.stdout or b"").decode(), 124  # bytes, whatever `text` says
        rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
        found[section] = {"exit": code, "seconds": round(time.monotonic() - started, 1), "rows": rows}
        (options.out / "calibrate.json").write_text(json.dumps(found, indent=1) + "\n")
        why = f": {log.read_text().splitlines()[-1:]}" if code else ""
        print(f"{section}: exit code {code}, {found[section]['seconds']} s{why}")
        for row in rows:
            figures = (
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print("   ", ", ".join(list(figures)[1:]).join([f"{row['name']}: ", ""]), flush=True)


SECTIONS = ("context", "products", "attention", "moved", "layers")

if __name__ == "__main__":
    main()
