"""Quantised releases: the tensors with codes and scales of each weight, by config.json and the headers of the files.

    scheme(config) -> Scheme | None               from quantization_config; a ValueError for unsupported formats
    packed(config, tensors) -> {name: Packed}     a ValueError names scales that are missing or do not fit

A weight W is computed from codes q and scales s, and rounded once at the end (trainer/weights/quantised/unpack.py):

| quant_method                        | tensors of X.weight                    | W[i, j]                              |
|-------------------------------------|----------------------------------------|--------------------------------------|
| fp8, weight_block_size [a, b]       | weight, weight_scale_inv               | q[i, j] * s[i // a, j // b]          |
| compressed-tensors, float-quantized | weight, weight_scale                   | the same; of channels a = 1, b = all |
| compressed-tensors, pack-quantized  | weight_packed, weight_scale, _shape    | the same; 8 codes of 4 bits a number |
| compressed-tensors, nvfp4-pack-...  | weight_packed, weight_scale, _global_  | q * (s / g), 16 codes a scale        |
| modelopt, NVFP4 and W4A16_NVFP4     | weight, weight_scale, weight_scale_2   | q * (s * g), 16 codes a scale        |
| compressed-tensors, mxfp4-pack-...  | weight_packed, weight_scale            | q * 2 ** (s - 127), 32 codes a scale |
| mxfp4                               | X_blocks, X_scales                     | the same, of all experts, transposed |

The last block of rows or columns may be shorter.
"""

import fnmatch
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from conf.model_files import safetensors_header
from contract.json_object import show

KEY = "quantization_config"
DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
WHOLE = 2**62  # size of a block that has all rows or columns
MX, NV = 32, 16  # codes of MXFP4 and of NVFP4 that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # values of 4-bit codes
SHOWN = 10  # names of tensors in a message
SCALES = ("F32", "BF16", "F8_E8M0")
FP8 = "F8_E4M3"
CODES = {"fp8": FP8, "int": "I32", "mxfp4": "U8", "nvfp4": "U8"}  # data type of the codes, by kind
OF_SCALES = {"mxfp4": ("U8",), "nvfp4": (FP8,)}
PLAIN = ".weight"  # weights that are not quantised have this ending too
# Further tensors of a module: scales of activations, and of a server's cached keys and values.
ASIDE = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


# quantization_config of tiny://KIND-fp8 and so on, which trainer.tiny makes. The blocks fit small weights. mxfp4 is
# for gpt-oss only.
_TINY = Path(__file__).parents[1] / "tables" / "tiny_quantization.json"
OF_TINY: dict[str, dict[str, Any]] = json.loads(_TINY.read_text("utf-8"))


class Tensor(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Scheme:
    """Format of a release's quantised weights."""

    kind: str  # fp8, int, mxfp4 or nvfp4
    codes: str  # ending of the names of the codes
    scales: str  # ending of the names of the scales
    block: tuple[int, int] = (1, MX)  # rows and columns that share a scale
    bits: int = 8
    besides: tuple[str, ...] = ()  # endings of required tensors that are not used
    unquantised: tuple[str, ...] = ()  # names of modules
    dtype: str = "BF16"  # of the unpacked weights, from config.json
    factor: str = ""  # ending of the name of a weight's common factor of all scales; empty: there is none
    divides: bool = False  # whether scales are divided by the factor, not multiplied

    @property
    def stacked(self) -> bool:
        """Whether a weight has all experts, transposed, as in gpt-oss."""
        return self.codes == "_blocks"


@dataclass(frozen=True)
class Packed:
    """A weight that is released as codes and scales; shape and type are those of the weight."""

    scheme: Scheme
    shape: tuple[int, ...]
    codes: str  # names of the released tensors
    scales: str
    besides: tuple[str, ...] = ()
    factor: str = ""
    aside: tuple[str, ...] = ()  # scales of activations, which are not read

    @property
    def dtype(self) -> str:
        return self.scheme.dtype

    @property
    def of_scales(self) -> tuple[str, ...]:
        return (self.scales, *([self.factor] if self.factor else []))

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.codes, *self.of_scales, *self.besides, *self.aside)


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    section = config.get(KEY)
    if not section:
        return None
    if not isinstance(section, dict):
        raise ValueError(f"{KEY} is {show(section)}, which is not a section of keys")
    method = section.get("quant_method")
    kind = SCHEMES.get(method) if isinstance(method, str) else None
    if kind is None:
        raise ValueError(f"{KEY}.quant_method is {show(method)}, but only {', '.join(SCHEMES)} are supported")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {show(dtype)}, but weights can only be unpacked to {', '.join(DTYPES)}")
    return kind(section, DTYPES[dtype])


def packed(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    """Return quantised weights by name. Raise ValueError for missing or extra scales and for wrong shapes."""
    wrong: dict[str, list[str]] = defaultdict(list)
    form = scheme(config)
    if form is None:
        wrong["FP8 tensors, but config.json has no quantization_config"] += _fp8(tensors)
        _require_none(wrong)
        return {}
    weights, used = {}, set()
    for name, tensor in tensors.items():
        if not name.endswith(form.codes) or (form.codes == PLAIN and tensor.dtype != CODES[form.kind]):
            continue
        stem = name.removesuffix(form.codes)
        scales, besides = stem + form.scales, tuple(stem + ending for ending in form.besides)
        factor = stem + form.factor if form.factor else ""
        aside = tuple(stem + ending for ending in ASIDE if stem + ending in tensors) if form.kind == "nvfp4" else ()
        shape, expected = _shapes(form, tensor)
        weight = Packed(form, shape or (), name, scales, besides, factor, aside)
        used |= {*weight.tensors}
        if missing := [other for other in (*weight.of_scales, *besides) if other not in tensors]:
            wrong["scales missing"] += missing
            continue
        if shape is None:
            wrong["codes of an unsupported type or shape"].append(f"{name} ({tensor.dtype} {list(tensor.shape)})")
        elif not _fits(tensors[scales].shape, expected, form):
            text = f"{scales} is {list(tensors[scales].shape)} but should be {list(expected)}"
            wrong["scales of the wrong shape"].append(text)
        elif factor and (prod(tensors[factor].shape) != 1 or tensors[factor].dtype != "F32"):
            text = f"{factor} is {tensors[factor].dtype} {list(tensors[factor].shape)} but should be one number in F32"
            wrong["scales of the wrong shape"].append(text)
        elif tensors[scales].dtype not in OF_SCALES.get(form.kind, SCALES):
            wrong["scales of an unsupported type"].append(f"{scales} ({tensors[scales].dtype})")
        elif _is_among(stem, form.unquantised):
            wrong[f"quantised, but excluded by {KEY}"].append(name)
        else:
            weights[stem + ("" if form.stacked else ".weight")] = weight
    endings = (form.scales, *form.besides, *filter(None, [form.factor]), *(ASIDE if form.kind == "nvfp4" else ()))
    wrong["scales without a weight"] += [name for name in tensors if name.endswith(endings) and name not in used]
    wrong["FP8 tensors without a scale"] += [
        name for name in _fp8(tensors) if name not in used and not name.endswith(endings)
    ]
    _require_none(wrong)
    return weights


def parameters(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the number of elements of all unpacked weights."""
    return sum(prod(weight.shape) for weight in _weights(config, tensors))


def of_tiny(source: str) -> tuple[str, str]:
    """Return the kind of a tiny model, and the format of its quantised weights; "" if they are not quantised."""
    for form in sorted(OF_TINY, key=len, reverse=True):
        if source.endswith(f"-{form}"):
            return source.removesuffix(f"-{form}"), form
    return source, ""


def size(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all unpacked weights."""
    return sum(prod(weight.shape) * safetensors_header.BITS[weight.dtype] // 8 for weight in _weights(config, tensors))


def _weights(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return all weights with their unpacked shapes and types."""
    packed_weights = packed(config, tensors)
    parts = {name for weight in packed_weights.values() for name in weight.tensors}
    return [*(tensor for name, tensor in tensors.items() if name not in parts), *packed_weights.values()]


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def _require_none(wrong: dict[str, list[str]]) -> None:
    lines = [f"{text} ({len(names)}): {', '.join(sorted(names)[:SHOWN])}" for text, names in wrong.items() if names]
    if lines:
        raise ValueError("; ".join(lines))


def _fp8(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dtype.startswith("F8") and tensor.dtype != "F8_E8M0"]


def _shapes(form: Scheme, codes: Tensor) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the shapes of the weight and of its scales; None for the weight if the codes do not have the format."""
    shape = codes.shape
    if form.stacked:
        matches = codes.dtype == "U8" and len(shape) == 4 and shape[3] == MX // 2
        return ((shape[0], shape[2] * MX, shape[1]) if matches else None), shape[:3]  # transposed, as gpt-oss has it
    if form.kind != "fp8":
        each = 32 // form.bits if form.kind == "int" else 2
        shape = (*shape[:-1], shape[-1] * each) if shape else shape
    if len(shape) != 2 or codes.dtype != CODES[form.kind]:
        return None, ()
    return shape, tuple(blocks(size, block) for size, block in zip(shape, form.block, strict=True))


def _fits(shape: tuple[int, ...], expected: tuple[int, ...], form: Scheme) -> bool:
    if form.block[1] != WHOLE:
        return shape == expected
    return shape in (expected, expected[:1]) or prod(shape) == prod(expected) == 1  # some releases omit sizes of 1


def _is_among(module: str, names: tuple[str, ...]) -> bool:
    """Whether the module is one of these, as transformers and compressed-tensors compare names."""
    for name in names:
        if name.startswith("re:"):
            if re.match(name.removeprefix("re:"), module):
                return True
        elif "*" in name:
            if fnmatch.fnmatchcase(module, name) or fnmatch.fnmatchcase(module, f"{name}.*"):
                return True
        elif module == name or module.startswith(name + ".") or module.endswith("." + name):
            return True
    return False


def _of_fp8(section: dict[str, Any], dtype: str) -> Scheme:
    block = section.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**20 for n in block)):
        text = f"{KEY}.weight_block_size is {show(block)}, but FP8 weights need blocks, such as [128, 128]"
        raise ValueError(text)
    _require(section, "fmt", ("e4m3", None))
    _require(section, "activation_scheme", ("dynamic", None))
    _require(section, "scale_fmt", ("float", "ue8m0", None))
    excluded = section.get("modules_to_not_convert") or section.get("ignored_layers") or ()
    return Scheme("fp8", ".weight", ".weight_scale_inv", (block[0], block[1]), 8, (), _names(excluded), dtype)


def _of_compressed(section: dict[str, Any], dtype: str) -> Scheme:
    groups = section.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    if len(groups) != 1 or not isinstance(groups[0].get("weights"), dict):
        raise ValueError(f"{KEY}.config_groups has {len(groups)} groups with weights, but only one is supported")
    group, weights = groups[0], groups[0]["weights"]
    for key, right in (("quantization_status", ("compressed", "frozen", None)), ("kv_cache_scheme", (None,))):
        _require(section, key, right)
    where = f"{KEY}.config_groups.weights."
    for key, right in (("symmetric", (True,)), ("actorder", (None,)), ("dynamic", (False, None))):
        _require(weights, key, right, where)
    activations = group.get("input_activations")
    if isinstance(activations, dict):  # NVFP4's also have a common scale, which an evaluation does not need
        _require(activations, "dynamic", (True, "local"), f"{KEY}.config_groups.input_activations.")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    ways = {"channel": (1, WHOLE), "tensor": (WHOLE, WHOLE)}
    size, block = weights.get("group_size"), weights.get("block_structure")
    if strategy == "group" and type(size) is int and 0 < size < 2**20:
        ways["group"] = (1, size)
    if strategy == "block" and isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block):
        ways["block"] = (block[0], block[1])
    stored = group.get("format") or section.get("format")
    if (strategy, size) == ("tensor_group", NV):
        ways["tensor_group"] = (1, NV)
    text = f"{show(stored)} of {show(bits)} bits, {show(kind)}, by {show(strategy)}"
    if strategy not in ways or min(ways[strategy]) < 1:
        raise ValueError(f"{KEY} is {text}; supported are tensor, channel, block, group and tensor_group of {NV}")
    excluded = _names(section.get("ignore") or ())
    if (kind, bits) == ("float", 8) and stored in ("float-quantized", "naive-quantized"):
        return Scheme("fp8", ".weight", ".weight_scale", ways[strategy], 8, (), excluded, dtype)
    if kind == "int" and bits in (4, 8) and stored == "pack-quantized":
        ends = (".weight_packed", ".weight_scale")
        return Scheme("int", *ends, ways[strategy], bits, (".weight_shape",), excluded, dtype)
    if (kind, bits, strategy, stored) == ("float", 4, "tensor_group", "nvfp4-pack-quantized"):
        _require(weights, "scale_dtype", ("torch.float8_e4m3fn", None), where)
        ends, factor = (".weight_packed", ".weight_scale"), ".weight_global_scale"
        return Scheme("nvfp4", *ends, (1, NV), 4, (), excluded, dtype, factor, divides=True)
    if (kind, bits, strategy, size, stored) == ("float", 4, "group", MX, "mxfp4-pack-quantized"):
        return Scheme("mxfp4", ".weight_packed", ".weight_scale", (1, MX), 4, (), excluded, dtype)
    raise ValueError(f"{KEY} is {text}, but only FP8, INT4, nvfp4- and mxfp4-pack-quantized are supported")


def _of_modelopt(section: dict[str, Any], dtype: str) -> Scheme:
    _require(section, "quant_algo", ("NVFP4", "W4A16_NVFP4"))
    _require(section, "group_size", (NV, None))
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        of_weights = {"group_size": NV, "num_bits": 4} | (weights if isinstance(weights, dict) else {})
        for key, right in (("group_size", NV), ("num_bits", 4)):
            if of_weights[key] != right:
                raise ValueError(f"{KEY}.config_groups.weights.{key} is {show(of_weights[key])}; supported is {right}")
    excluded = _names(section.get("ignore") or section.get("exclude_modules") or ())
    return Scheme("nvfp4", PLAIN, ".weight_scale", (1, NV), 4, (), excluded, dtype, ".weight_scale_2")


def _of_mxfp4(section: dict[str, Any], dtype: str) -> Scheme:
    excluded = _names(section.get("modules_to_not_convert") or ())
    return Scheme("mxfp4", "_blocks", "_scales", (1, MX), 4, (), excluded, dtype)


SCHEMES = {"fp8": _of_fp8, "compressed-tensors": _of_compressed, "mxfp4": _of_mxfp4, "modelopt": _of_modelopt}


def _require(section: dict[str, Any], key: str, right: tuple[Any, ...], where: str = f"{KEY}.") -> None:
    value = section.get(key)
    if not any(value is one or (isinstance(one, str) and value == one) for one in right):
        others = " or ".join("absent" if one is None else show(one) for one in right)
        raise ValueError(f"{where}{key} is {show(value)}, but only {others} is supported")


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{KEY} excludes {show(value)}, which is not a list of modules")
    for name in value:
        try:
            re.compile(name.removeprefix("re:")) if name.startswith("re:") else None
        except (re.error, RecursionError, OverflowError):
            raise ValueError(f"{KEY} excludes {show(name)}, which is not a pattern") from None
    return tuple(value)
