"""Writer of the merged model as one GGUF file, for llama.cpp: export.gguf.

Names of tensors and keys are those of the package gguf; the values are what llama.cpp's loader expects of a family:

- all experts of a layer are one tensor
- vectors and routers are in fp32; in q8_0, a matrix whose rows have no whole groups of 32 is in f16
- for architecture llama, rows of queries and keys are paired for another kind of rotation, and Llama 3's scaling of
  frequencies is a tensor

gguf_tokenizer.py has the tokenizer. The file is read back: each tensor must have the checksum of the written bytes.
"""

# pyright: reportArgumentType=false, reportMissingImports=false

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from conf import families, model_facts
from conf.model_files import config_json
from conf.rules.shipping import rotation
from contract.faults import Fault
from trainer.weights import released, released_tensors
from trainer.weights.exported import gguf_tokenizer

EXPERT = re.compile(r"(?P<stem>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>.+)")
LLAMA3 = "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
GROUP = 32  # numbers of q8_0 that share a scale


@dataclass(frozen=True)
class Source:
    """A tensor of the file, and the weights that it consists of."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str  # f32, bf16, f16 or q8_0


def write(folder: Path, path: Path, kind: str, trust: bool) -> None:
    """Write the merged model in the folder."""
    import gguf

    model = released.read(folder)
    architecture = families.of(model.config).gguf
    writer = gguf.GGUFWriter(None, architecture)
    _describe(writer, model.config, kind)
    gguf_tokenizer.add(writer, folder, model.config, architecture, trust)
    sources, scaling = _sources(model, architecture, kind), _scaling(model.config)
    if scaling is not None:
        writer.add_tensor_info("rope_freqs.weight", scaling.shape, scaling.dtype, scaling.nbytes)
    for one in sources:
        dtype, raw = _types(one.kind)
        shape = gguf.quant_shape_to_byte_shape(one.shape, raw) if dtype == "uint8" else one.shape
        writer.add_tensor_info(one.name, shape, _numpy(dtype), math.prod(shape) * _numpy(dtype).itemsize, raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    sums = {} if scaling is None else {"rope_freqs.weight": _write(writer, scaling)}
    for one in sources:
        sums[one.name] = _write(writer, _numbers(model, one, architecture))
    writer.close()
    found = {tensor.name: _sum(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    if wrong := sorted(name for name in sums.keys() | found.keys() if sums.get(name) != found.get(name)):
        raise Fault(f"{path}: read back, {len(wrong)} tensors are wrong: {released.enumerate_names(wrong)}")


def _describe(writer: Any, config: dict[str, Any], kind: str) -> None:
    """Add the keys of the architecture."""
    import gguf

    facts, text = model_facts.facts_from_hf(config), config_json.of_text(config)
    writer.add_type(gguf.GGUFType.MODEL)
    types = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(facts.layers + facts.mtp_layers)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(facts.hidden)
    writer.add_feed_forward_length(facts.ffn or facts.expert_ffn)
    writer.add_head_count(facts.heads)
    writer.add_head_count_kv(facts.kv_heads)
    writer.add_key_length(facts.head_dim)
    writer.add_value_length(facts.head_dim)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_vocab_size(facts.vocab)
    rotary = rotation(config)
    writer.add_rope_freq_base(float(rotary["rope_theta"]))
    writer.add_rope_dimension_count(int(facts.head_dim * rotary["partial_rotary_factor"]))
    if not facts.experts:
        return
    writer.add_expert_count(facts.experts)
    writer.add_expert_used_count(facts.top_k)
    writer.add_expert_feed_forward_length(facts.expert_ffn)
    if facts.shared_ffn:
        writer.add_expert_shared_feed_forward_length(facts.shared_ffn)
    if facts.expert_bias:  # DeepSeek-V3's routing, as in GLM-4.5
        writer.add_expert_shared_count(text["n_shared_experts"])
        writer.add_leading_dense_block_count(facts.dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(float(text.get("routed_scaling_factor", 1.0)))
        writer.add_expert_weights_norm(bool(text.get("norm_topk_prob", True)))
        writer.add_nextn_predict_layers(facts.mtp_layers)


def _sources(model: released.Model, architecture: str, kind: str) -> list[Source]:
    import gguf

    facts = model_facts.facts_from_hf(model.config)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, facts.layers + facts.mtp_layers)
    tied = {"lm_head.weight"} & released.repeated(model).keys()
    found: dict[str, list[str]] = {}
    for name in model.weights.keys() - tied:
        expert = EXPERT.fullmatch(name)
        whole = f"{expert['stem']}.{expert['leaf']}" if expert else name
        found.setdefault(whole.replace("correction_bias", "correction.bias"), []).append(name)
    result = []
    for whole, parts in sorted(found.items()):
        if released.COMPUTED.search(whole):
            continue
        name = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise Fault(f"export.gguf: {kind}, but the package gguf has no name for {whole} of {architecture}; null")
        parts.sort(key=lambda part: int(match["number"]) if (match := EXPERT.fullmatch(part)) else 0)
        one = model.weights[parts[0]].shape
        shape = (len(parts), *one) if EXPERT.fullmatch(parts[0]) else one
        result.append(Source(name, tuple(parts), shape, _kind(name, shape, kind)))
    return result


def _kind(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or ".ffn_gate_inp" in name:
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % GROUP else kind


def _types(kind: str) -> tuple[str, Any]:
    """Return numpy's type of the numbers in memory, and gguf's type of them in the file."""
    import gguf

    types = gguf.GGMLQuantizationType
    return {
        "f32": ("float32", None),
        "f16": ("float16", None),
        "bf16": ("uint8", types.BF16),
        "q8_0": ("uint8", types.Q8_0),
    }[kind]


def _numpy(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


def _numbers(model: released.Model, one: Source, architecture: str) -> Any:
    """Return the numbers of a tensor, in the types of the file."""
    import gguf
    import numpy as np

    facts, rows = model_facts.facts_from_hf(model.config), []
    for part in one.parts:
        weight = released_tensors.read(model, part).float()
        if architecture == "llama" and (heads := _heads(part, facts)):
            weight = weight.view(heads, 2, facts.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
        if one.kind == "q8_0":
            rows.append(gguf.quants.quantize(weight.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0))
        elif one.kind == "bf16":
            rows.append(weight.bfloat16().contiguous().view(torch.uint8).numpy())
        else:
            rows.append(weight.to(torch.float16 if one.kind == "f16" else torch.float32).contiguous().numpy())
            if not np.isfinite(rows[-1]).all():
                raise Fault(f"export.gguf: {one.kind} has no value as large as those of {part}; bf16")
    return np.stack(rows) if len(one.shape) == 3 else rows[0]


def _heads(name: str, facts: Any) -> int:
    """Return the heads of a tensor of queries or keys; 0 for others."""
    return {"q_proj": facts.heads, "k_proj": facts.kv_heads}.get(name.split(".")[-2], 0)


def _scaling(config: dict[str, Any]) -> Any:
    """Return the factors of Llama 3's frequencies, as its paper's code computes them; None for other models."""
    import numpy as np

    rotary, width = rotation(config), model_facts.facts_from_hf(config).head_dim
    if rotary["rope_type"] != "llama3":
        return None
    waves = [2 * math.pi * rotary["rope_theta"] ** (at / width) for at in range(0, width, 2)]
    before, low, high = (rotary[key] for key in LLAMA3)
    shares = [min(max((before / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    return np.array([1 / ((1 - share) / rotary["factor"] + share) for share in shares], np.float32)


def _write(writer: Any, numbers: Any) -> str:
    writer.write_tensor_data(numbers)
    return _sum(numbers)


def _sum(numbers: Any) -> str:
    return xxhash.xxh3_128_hexdigest(memoryview(numbers.reshape(-1)).cast("B"))
