"""Small Qwen3-MoE of some 20 KB, written without torch: for tests that damage files by the thousand."""

import json
import random
import struct
from math import prod
from pathlib import Path
from typing import Any

from conf.model_facts import shapes
from trainer.rehearsal import tiny_models

# 2 layers, 4 experts; heads of 8. Nothing below can serve it, all that reads its files can.
CONFIG: dict[str, Any] = tiny_models.KINDS["qwen3-moe"] | {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "vocab_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "dtype": "bfloat16",
}
GPT2: dict[str, Any] = tiny_models.KINDS["gpt2"] | {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 48,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 1,
    "dtype": "bfloat16",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SPECIAL = ("<|endoftext|>", "<|pad|>")
LETTERS = "abcdefghijklmnopqrstuvwxyz .:?0123456789"


def write(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    folder.mkdir(parents=True)
    released = shapes(config)
    names = list(released)
    parts = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for shard, part in parts.items():
        header, content = tensors({name: released[name] for name in part})
        write_shard(folder / shard, header, content)
    index = {"metadata": {}, "weight_map": {name: shard for shard, part in parts.items() for name in part}}
    files = {"config.json": config, "model.safetensors.index.json": index}
    files |= {"tokenizer.json": tokenizer(), "tokenizer_config.json": settings()}
    files["special_tokens_map.json"] = {"eos_token": SPECIAL[0], "pad_token": {"content": SPECIAL[1]}}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


def tensors(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], bytes]:
    """Header and bytes of bf16 numbers around 1, no two alike in a row."""
    draw, header, content = random.Random("small model"), {}, b""
    for name, shape in shapes.items():
        values = struct.pack(f"<{prod(shape)}H", *(0x3F00 + draw.randrange(256) for _ in range(prod(shape))))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(content), len(content + values)]}
        content += values
    return header, content


def write_shard(path: Path, header: Any, content: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    found = path.read_bytes()
    (length,) = struct.unpack("<Q", found[:8])
    return json.loads(found[8 : 8 + length]), found[8 + length :]


def tokenizer() -> dict[str, Any]:
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS))}
    added = [
        {"id": number, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, token in enumerate(SPECIAL)
    ]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"version": "1.0", "added_tokens": added, "model": model}


def settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[1],
        "added_tokens_decoder": {str(number): {"content": token} for number, token in enumerate(SPECIAL)},
    }
