"""Write a model with random weights as a folder in Hugging Face's format: config.json, tokenizer and safetensors.

Tensors are drawn and written in blocks, so a few megabytes of memory are enough for a model of any size.

Initial values are those of transformers' from_config(): matrices, embeddings, sinks and router biases are normally
distributed with the standard deviation initializer_range; norms are 1; other biases and the embedding of pad_token_id
are 0. Some families have exceptions.

Values depend only on the seed, the tensor's name and the block. NumPy's Philox generator and its ziggurat method draw
them, so the number of processes and torch's vector units do not change them.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from conf import families
from conf.families.parts.family import Config
from conf.model_facts import shapes
from conf.model_files import config_json, tokenizer_files
from conf.model_files.safetensors_header import BITS
from contract.faults import Fault
from trainer.patches import families as patches
from trainer.patches.transformers_imports import import_transformers
from trainer.weights import new_safetensors
from trainer.weights.drawn.new_folder import new_folder
from trainer.weights.released_tensors import DTYPES, as_bytes

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ENDS = ("bos_token", "eos_token", "pad_token")
BLOCK = 1 << 20  # numbers
USUAL = 0.02  # initializer_range, if config.json lacks it
NORM = re.compile(r"(norm|\.ln_[12f])\.weight$")
EMBEDDING = re.compile(r"(embed_tokens|\bwte)\.weight$")
CORRECTION = "e_score_correction_bias"  # of routers; float32 in every release
DECAY = "A_log"  # of gated delta nets: logarithms of numbers between 0 and 16


def write(config: Config, tokenizer: Path, folder: Path, seed: int, report: Callable[[int, int], None]) -> None:
    """Write the folder; it appears only when it is complete. Call report(done, total), in bytes, after each tensor."""
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
        _write_shards(described, TYPES[named], partial, seed, report)


def described_whole(config: Config) -> Config:
    """Return the configuration with transformers' defaults for all keys that it lacks."""
    import_transformers()
    patches.install(config.get("model_type"))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise Fault(f"config.json: model_type: {json.dumps(kind)}: transformers has no such model")
    try:
        defaults = CONFIG_MAPPING[kind].from_dict(config_json.with_floats(config)).to_dict()
    except Exception as error:  # each family checks its keys in its own way, and may raise any type
        raise Fault(f"config.json: transformers rejects it: {' '.join(str(error).split())}") from None
    whole = defaults | {key: value for key, value in config.items() if value is not None}
    if "num_attention_heads" in whole and not whole.get("head_dim"):
        whole["head_dim"] = whole["hidden_size"] // whole["num_attention_heads"]
    return whole


def with_ends(config: Config, tokenizer: Path) -> Config:
    """Return the configuration with the ids of the tokenizer's special tokens. Ids that it already has stay."""
    from trainer.data.tokens import tokenizer as tokenizers

    known = tokenizers.load(tokenizer, trust_remote_code=False)
    named = {f"{name}_id": getattr(known, f"{name}_id") for name in ENDS}
    return {key: value for key, value in named.items() if value is not None} | config


def _write_shards(config: Config, dtype: str, folder: Path, seed: int, report: Callable[[int, int], None]) -> None:
    tensors = shapes(config)
    types = {name: "F32" if name.endswith(CORRECTION) else dtype for name in tensors}
    sizes = {name: math.prod(shape) * BITS[types[name]] // 8 for name, shape in tensors.items()}
    files, total, done = new_safetensors.shards(sizes), sum(sizes.values()), 0
    for file, part in files.items():
        with (folder / file).open("wb") as f:
            f.write(new_safetensors.header(file, {name: (types[name], tensors[name]) for name in part})[0])
            for name in part:
                for block in blocks(config, name, tensors[name], seed):
                    f.write(as_bytes(torch.from_numpy(block).to(DTYPES[types[name]])))
                done += sizes[name]
                report(done, total)
    if len(files) > 1:
        new_safetensors.write_index(folder, total, {name: file for file, part in files.items() for name in part})


def spread(config: Config, name: str) -> float:
    """Return the standard deviation of a tensor's values; 0 if all values are equal."""
    usual = config.get("initializer_range") or USUAL
    if name.endswith(".mlp.router.bias"):
        return usual
    family = families.of(config)
    if NORM.search(name) or name.endswith("bias") or family.constant(name) is not None:
        return 0.0
    if name.endswith(family.narrow):
        return usual / math.sqrt(2 * config[family.key("num_hidden_layers")])
    return usual


def blocks(config: Config, name: str, shape: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """Yield all values of a tensor in fp32, in the order of its bytes."""
    count, deviation = math.prod(shape), spread(config, name)
    constant = families.of(config).constant(name)
    constant = constant if constant is not None else 1.0 if NORM.search(name) else 0.0
    hole = _padding(config, name, shape)
    for number, start in enumerate(range(0, count, BLOCK)):
        size = min(BLOCK, count - start)
        if not deviation:
            yield np.full(size, constant, np.float32)
            continue
        generator = _generator(seed, name, number)
        if name.endswith(DECAY):
            yield np.log(16 * (1 - generator.random(size, np.float32)))
            continue
        values = generator.standard_normal(size, np.float32)
        values *= np.float32(deviation)
        values[max(0, hole.start - start) : max(0, hole.stop - start)] = 0
        yield values


def _padding(config: Config, name: str, shape: tuple[int, ...]) -> range:
    """Return the range of values in the embedding that belong to the padding token, and are 0."""
    token = config.get("pad_token_id")
    if token is None or not families.of(config).zero_padding or not EMBEDDING.search(name):
        return range(0)
    return range(token * shape[1], (token + 1) * shape[1])


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.sha256(f"{seed} {block} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
