"""A model with drawn weights as a folder in Hugging Face's format: config.json, tokenizer and safetensors.

Tensors are drawn and written in blocks: memory holds a few megabytes, whatever the model's size.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from conf.families.parts.family import Config
from conf.model_facts import shapes
from conf.model_files import config_json, tokenizer_files, weights
from conf.model_files.safetensors_header import BITS
from contract.faults import Fault
from contract.groups import grouped
from trainer.patches import families
from trainer.patches.transformers_imports import import_transformers
from trainer.weights import new_safetensors
from trainer.weights.drawn import values
from trainer.weights.drawn.new_folder import new_folder

SHARD = 4 * 10**9  # bytes of a file, at most, but for a larger tensor
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ENDS = ("bos_token", "eos_token", "pad_token")


def write(config: Config, tokenizer: Path, folder: Path, seed: int, told: Callable[[int, int], None]) -> None:
    """Write the folder, whole or not at all. `told` gets the bytes so far, and all of them."""
    if config.get("quantization_config"):
        raise Fault("config.json: quantization_config: drawn weights are unquantised; leave it out")
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    if named not in TYPES:
        raise Fault(f"config.json: dtype: {named}: drawn weights are {', '.join(TYPES)}")
    tokenizer_files.check(tokenizer, config.get("vocab_size"))
    config = with_ends(config, tokenizer)
    described = described_whole(config)
    with new_folder(folder) as partial:
        for name in tokenizer_files.NAMES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, partial / name)
        (partial / config_json.NAME).write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(described, TYPES[named], partial, seed, told)


def described_whole(config: Config) -> Config:
    """The configuration with all that transformers takes for granted of its family."""
    import_transformers()
    families.install(config.get("model_type"))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise Fault(f"config.json: model_type: {json.dumps(kind)}: transformers has no such model")
    try:
        made = CONFIG_MAPPING[kind].from_dict(config).to_dict()
    except Exception as error:  # of any kind: whatever a family checks of its keys
        raise Fault(f"config.json: transformers does not take it: {' '.join(str(error).split())}") from None
    found = made | {key: value for key, value in config.items() if value is not None}
    if "num_attention_heads" in found and not found.get("head_dim"):
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return found


def with_ends(config: Config, tokenizer: Path) -> Config:
    """The configuration with the ids of the tokenizer's special tokens, unless it has them."""
    from trainer.data.tokens import tokenizer as tokenizers

    known = tokenizers.load(tokenizer, trust_remote_code=False)
    named = {f"{name}_id": getattr(known, f"{name}_id") for name in ENDS}
    return {key: value for key, value in named.items() if value is not None} | config


def _write_shards(config: Config, dtype: str, folder: Path, seed: int, told: Callable[[int, int], None]) -> None:
    tensors = shapes(config)
    types = {name: "F32" if name.endswith(values.CORRECTION) else dtype for name in tensors}
    sizes = {name: math.prod(shape) * BITS[types[name]] // 8 for name, shape in tensors.items()}
    parts, total = [*grouped(sizes.items(), SHARD)], sum(sizes.values())
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    files, done = dict(zip(names if len(parts) > 1 else [weights.SINGLE], parts, strict=True)), 0
    for file, part in files.items():
        with (folder / file).open("wb") as f:
            f.write(new_safetensors.header(file, {name: (types[name], tensors[name]) for name in part})[0])
            for name in part:
                for block in values.blocks(config, name, tensors[name], seed):
                    f.write(values.encode(block, types[name]))
                done += sizes[name]
                told(done, total)
    if len(parts) > 1:
        new_safetensors.write_index(folder, total, {name: file for file, part in files.items() for name in part})
