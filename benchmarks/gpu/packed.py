"""Frozen bases that lie packed (model.base) on this host's GPU: the unpacking, layers, and steps of GLM-4.7's layers.

    benchmarks/gpu/run packed.py OUT [--only SECTION ...] [--layers K]          4 minutes on one H200

    kernel    GB/s of unpacking a layer's experts, qkv and other widths, beside a copy's; whether the bits are torch's,
              and whether packing gives a CPU's codes
    layers    Transformer Engine's layers with packed weights beside ones with the same weights in bf16: outputs,
              gradients, bytes kept for backward
    steps     trainer.trial of glm47, cut to K (5) layers on one GPU, with each base: ms, GB, and what is planned

Each line is a JSON object, which OUT/packed.jsonl gets too. The exit code is 1 where bits differ or a section failed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from calibrate import EXPERTS, HIDDEN, INNER, ms, normal
from plan import LORA, WHOLE, Trial, take

BASES = ("fp8", "int4", "nvfp4", "mxfp4")
WIDTHS = {
    "experts fc1": (EXPERTS // 4, 2 * INNER, HIDDEN),
    "experts fc2": (EXPERTS // 4, HIDDEN, INNER),
    "qkv": (1, 14336, HIDDEN),
    "dense fc2": (1, HIDDEN, 12288),
    "air's fc1 over etp 2": (64, 1408, 4096),
}
STEPS = f"{LORA} {WHOLE} model.mtp=false train.micro_batch=1 train.global_batch=2"


def stored(base: str, shape: tuple[int, int, int]):
    import torch

    from conf.rules.packed_base import FORMATS
    from trainer.megatron.packed_base import drawn

    count, rows, columns = shape
    found = drawn.store(FORMATS[base], count, (rows, columns), torch.bfloat16)
    random = torch.rand(found.scales.shape, device="cuda")
    if base == "mxfp4":
        found.scales.sub_((8 * random).to(torch.uint8))
    else:
        found.scales.copy_(random * found.scales.float())  # each its own
    return found


def kernel():
    import torch

    from trainer.megatron.packed_base import codes
    from trainer.megatron.packed_base import kernel as of_gpu

    yield {"name": "copy", "GB/s": copying()}
    for base in BASES:
        for name, shape in WIDTHS.items():
            one = stored(base, shape)
            same = torch.equal(of_gpu.unpack(one), codes.unpack(one))
            took = ms(lambda one=one: of_gpu.unpack(one))
            size = one.bytes + 2 * shape[0] * shape[1] * shape[2]
            yield {"name": f"unpack {base} {name}", "ms": took, "GB/s": size / took / 1e6, "same": same}
        yield {"name": f"unpack {base} every code", "same": every_code(base)}
        yield {"name": f"pack {base}", "same": packs_as_a_cpu_does(base)}


def copying() -> float:
    import torch

    whole = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(whole)
    return whole.nbytes * 2 / ms(lambda: other.copy_(whole)) / 1e6


def packs_as_a_cpu_does(base: str) -> bool:
    """Whether weights of several sizes have the same codes, scales and factor as on a CPU."""
    import torch

    from conf.rules.packed_base import FORMATS
    from trainer.startup import device

    device.start()
    from trainer.weights.packed_base.packing import _pack

    def bits(found: Any) -> list[torch.Tensor]:
        return [one.cpu().view(torch.uint8 if one.itemsize == 1 else torch.int32) for one in found if one is not None]

    random = torch.Generator().manual_seed(1)
    for size in (1.0, 0.02, 3e-4):
        weight = (torch.randn(2048, 4096, generator=random) * size).bfloat16()
        pairs = zip(bits(_pack(FORMATS[base], weight)), bits(_pack(FORMATS[base], weight.cuda())), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            return False
    return True


def every_code(base: str) -> bool:
    """Whether each code gives the same bits with scales from the smallest to the largest, in every type."""
    import torch

    from trainer.megatron.packed_base import codes
    from trainer.megatron.packed_base import kernel as of_gpu

    bytes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(1, 64, 4)
    bytes[(bytes & 127) == 127] = 1
    scales = torch.logspace(-30, 30, 64 * 1024 // 32, device="cuda")
    same = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if base == "fp8":
            given = bytes.view(codes.FP8), scales[: 64 * 8].view(1, 64, 8), (1, 128), dtype
        elif base == "int4":
            given = bytes, scales.repeat(2)[: 64 * 64].view(1, 64, 64).bfloat16(), (1, 32), dtype
        elif base == "nvfp4":
            of_groups = bytes.view(-1)[: 64 * 128].view(1, 64, 128).view(torch.float8_e4m3fn)
            given = bytes, of_groups, (1, 16), dtype, scales[:64].view(1, 64)
        else:
            given = bytes, bytes.view(-1).clamp(max=254)[: 64 * 64].view(1, 64, 64), (1, 32), dtype
        store = codes.Codes(*given)
        one, other = of_gpu.unpack(store), codes.unpack(store)
        same &= torch.equal(one.nan_to_num(), other.nan_to_num())
    return same


def layers():
    import torch
    import transformer_engine.pytorch as te

    made = {
        "Linear": lambda **more: te.Linear(HIDDEN, 4096, bias=False, params_dtype=torch.bfloat16, **more),
        "LayerNormLinear": lambda **more: te.LayerNormLinear(
            HIDDEN, 4096, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, **more
        ),
        "GroupedLinear": lambda **more: te.GroupedLinear(
            16, HIDDEN, 2 * INNER, bias=False, params_dtype=torch.bfloat16, **more
        ),
    }
    for base in BASES:
        for name, make in made.items():
            sizes = ([64 * (1 + i % 3) * (i != 5) for i in range(16)],) if name == "GroupedLinear" else ()
            yield {"name": f"{name} {base}", **compared(base, make, sizes)}


def compared(base: str, make, sizes: tuple) -> dict[str, Any]:
    import torch
    from torch import nn

    from trainer.megatron.packed_base import weight

    packed, plain = make(device="meta"), make(device="cuda")
    ((_, layer, names),) = weight.layers(packed)
    shape = (len(names), *plain.get_parameter(names[0]).shape)
    weight.attach(layer, names, stored(base, shape))
    weight.fill(packed, start=True)
    with torch.no_grad():
        for name, one in zip(names, layer.get_parameter(names[0]).store.unpack(), strict=True):
            plain.get_parameter(name).copy_(one)
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    packed = nn.Module.bfloat16(packed.cuda())
    rows = sum(sizes[0]) if sizes else 4096
    found, out = {}, None
    for kind, module in (("plain", plain), ("packed", packed)):
        torch.manual_seed(0)
        x = normal(rows, HIDDEN, grad=True)
        gradient = normal(rows, shape[1])
        out = None
        before = torch.cuda.memory_allocated()
        out = module(x, *sizes)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        torch.cuda.reset_peak_memory_stats()
        out.backward(gradient)
        peak = torch.cuda.max_memory_allocated() - before
        found[kind] = (out.detach(), x.grad, kept, peak)
    same = all(torch.equal(one, other) for one, other in zip(found["plain"][:2], found["packed"][:2], strict=True))
    figures = {f"{what}_{kind}": found[kind][at] / 1e6 for kind in found for what, at in (("kept", 2), ("peak", 3))}
    return {"same": same, **{f"{key}_MB": round(value, 1) for key, value in figures.items()}}


def steps(count: int):
    for base in ("bf16", *BASES):
        row = take(Trial(base, "packed", "glm47", count, f"{STEPS} model.base={base}", 8))
        found: dict[str, Any] = {"name": f"glm47, {count} layers, {base}"}
        if "failed" in row or not row.get("ranks"):
            yield found | {"failed": row.get("failed", "no figures"), "stderr": row.get("stderr", "")[-1500:]}
            continue
        measured, planned = row["ranks"][0]["measured"], row["ranks"][0]["planned"]
        for key in ("seconds", "weights", "allocated", "device"):
            scale, unit = (1e-3, "ms") if key == "seconds" else (1e9, "GB")
            found[f"{key}_{unit}"] = round(measured[key] / scale, 3)
            found[f"{key}_planned"] = round(planned[key] / scale, 3)
        yield found | {"losses": row["ranks"][0]["losses"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="of the results (default $OUT or runs/gpu)")
    parser.add_argument("--only", nargs="*", default=["kernel", "layers", "steps"], metavar="SECTION")
    parser.add_argument("--layers", type=int, default=5, metavar="K", help="layers of glm47 in steps (5)")
    options = parser.parse_args()
    out = options.out or Path(os.environ.get("OUT", "runs/gpu"))
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    sections = {"kernel": kernel, "layers": layers, "steps": lambda: steps(options.layers)}
    with (out / "packed.jsonl").open("a") as lines:
        for section in options.only:
            try:
                for row in sections[section]():
                    failed |= "failed" in row or row.get("same") is False
                    print(line := json.dumps(row), flush=True)
                    print(line, file=lines, flush=True)
            except Exception as error:  # a section that fails is a finding, and the next goes on
                failed = True
                print(json.dumps({"name": section, "failed": f"{type(error).__name__}: {error}"[:600]}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
