"""Tensors and config.json of quantised weights in files, as vLLM and the formats' own libraries read them.

    section(form, modules)                     quantization_config of config.json; these modules are not quantised
    entries(form, name, shape)                 type and shape of each tensor of a weight, by name
    tensors(form, name, shape, found)          the tensors: codes, scales, and the factor in nvfp4

| format | `quant_method`, format                    | tensors                                              |
|--------|-------------------------------------------|------------------------------------------------------|
| fp8    | fp8, in blocks, as DeepSeek-V3            | weight, weight_scale_inv                             |
| int4   | compressed-tensors, pack-quantized        | weight_packed, weight_scale, weight_shape            |
| nvfp4  | modelopt, W4A16_NVFP4                     | weight, weight_scale, weight_scale_2                 |
| mxfp4  | compressed-tensors, mxfp4-pack-quantized  | weight_packed, weight_scale                          |

compressed-tensors also has an NVFP4, which divides scales by a number. One factor in a hundred has no number whose
quotients equal its products in bf16. ModelOpt multiplies with the factor. vLLM computes both with the same kernel.
"""

import re
from collections.abc import Collection
from typing import Any

import torch

from conf.rules.packed_base import Format
from trainer.weights.packed_base.part import Found

Entries = dict[str, tuple[str, tuple[int, ...]]]
IN_BF16 = re.compile(r".*\.in_proj_(a|b|ba)\.weight")  # vLLM joins them, and has no codes for so few rows
EXPERTS = re.compile(r"(.*\.experts)\.\d+\..*")


def section(form: Format, modules: Collection[str]) -> dict[str, Any]:
    if form.kind == "fp8":
        numbers = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return numbers | {"weight_block_size": [*form.block], "modules_to_not_convert": _listed(modules, "{}")}
    size = form.block[1]
    if form.kind == "nvfp4":
        numbers = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": size}
        return numbers | {"producer": {"name": "modelopt"}, "ignore": _listed(modules, "{}*")}
    numbers = {"num_bits": form.bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    if form.kind == "mxfp4":
        numbers |= {"type": "float", "scale_dtype": "torch.uint8"}
    stored = {"int": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}[form.kind]
    group = {"targets": ["Linear"], "weights": numbers, "format": stored}
    whole = {"quant_method": "compressed-tensors", "format": stored, "ignore": _listed(modules, "re:{}.*")}
    return whole | {"quantization_status": "compressed", "config_groups": {"group_0": group}}


def entries(form: Format, name: str, shape: tuple[int, ...]) -> Entries:
    (rows, columns), (height, width) = shape, form.block
    blocks, halves = (-(-rows // height), -(-columns // width)), (rows, columns // 2)
    if form.kind == "fp8":
        return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", blocks)}
    if form.kind == "nvfp4":
        return {name: ("U8", halves), f"{name}_scale": ("F8_E4M3", blocks), f"{name}_scale_2": ("F32", ())}
    if form.kind == "mxfp4":
        return {f"{name}_packed": ("U8", halves), f"{name}_scale": ("U8", blocks)}
    packed = {f"{name}_packed": ("I32", (rows, columns // 8)), f"{name}_scale": ("BF16", blocks)}
    return packed | {f"{name}_shape": ("I64", (2,))}


def tensors(form: Format, name: str, shape: tuple[int, ...], found: Found) -> dict[str, torch.Tensor]:
    codes, scales, more = found
    if form.kind == "int":
        codes, more = codes.contiguous().view(torch.int32), torch.tensor(shape)
    every = (codes, scales) if more is None else (codes, scales, more)
    return dict(zip(entries(form, name, shape), every, strict=True))


def _listed(modules: Collection[str], experts: str) -> list[str]:
    """Return the names as the format lists them. The experts of a layer are one name, made with this pattern."""
    found = {name: EXPERTS.fullmatch(name) for name in modules}
    escape = re.escape if experts.startswith("re:") else str
    return sorted({experts.format(escape(match[1])) if match else name for name, match in found.items()})
