"""Tokenizer of a GGUF file. It must be a byte-level BPE whose splitting rule llama.cpp has under a name.

check(model, kind)              a Fault if the file cannot be written
add(writer, folder, ...)        adds tokens, their types, merges, special tokens and the chat template
"""

# pyright: reportArgumentType=false, reportMissingImports=false

import importlib.util
from pathlib import Path
from typing import Any

from conf.model_files import config_json
from contract import json_object
from contract.faults import Fault
from trainer.data.tokens import tokenizer as tokenizers

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# llama.cpp's names of splitting rules, by the regular expression of tokenizer.json, and by ignore_merges.
RULES = {
    ("", False): "gpt-2",
    (CONTRACTIONS + SPLIT % "", False): "qwen2",
    (CONTRACTIONS + SPLIT % "{1,3}", True): "llama-bpe",
    (CONTRACTIONS + SPLIT % "{1,3}", False): "glm4",
}
TURNS = {"glm4moe": "<|user|>"}  # tokens that end an answer, in addition to eos


def check(model: Path, kind: str) -> None:
    """Raise a Fault if the file cannot be written for the tokenizer, or the package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise Fault(f"export.gguf: {kind}, but the package gguf is missing: uv pip install gguf, or null")
    _rule(model, kind)


def add(writer: Any, folder: Path, config: dict[str, Any], architecture: str, trust: bool) -> None:
    import gguf

    tokenizer, size = tokenizers.load(folder, trust), config_json.of_text(config)["vocab_size"]
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = {number: "CONTROL" if token.special else "USER_DEFINED" for number, token in added.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    types = [kinds.get(number, "NORMAL") if number in names else "UNUSED" for number in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_rule(folder, "file"))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType[kind] for kind in types])
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    if (turn := TURNS.get(architecture)) in names.values():
        special.special_token_ids["eot"] = tokens.index(turn)
    special.add_to_gguf(writer, quiet=True)


def _rule(model: Path, kind: str) -> str:
    """Return llama.cpp's name of the tokenizer's splitting rule."""
    path = model / "tokenizer.json"
    settings = json_object.read(path) if path.exists() else {}
    before, of_model = settings.get("pre_tokenizer") or {}, settings.get("model") or {}
    steps = before.get("pretokenizers") or [before]
    patterns = [(step.get("pattern") or {}).get("Regex") for step in steps if step.get("type") == "Split"]
    patterns += [""] * any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps)
    is_bytes = of_model.get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)
    key = (patterns[0] if len(patterns) == 1 else None, bool(of_model.get("ignore_merges")))
    if not is_bytes or key not in RULES:
        text = "the tokenizer is not a byte-level BPE with a splitting rule of GPT-2, Llama 3, Qwen2 or GLM-4"
        raise Fault(f"export.gguf: {kind}, but {text}; null")
    return RULES[key]
