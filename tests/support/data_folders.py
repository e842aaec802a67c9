"""Tokenizer folders for tests: byte-level BPE with the special tokens of model families, and templates as theirs."""

import functools
import json
from pathlib import Path

TEXT = """\
system\nuser\nassistant\nYou are a helpful assistant. What is 17 + 25? The answer is 42, and that is all there is to it.
Call a tool: {"name": "add", "arguments": {"a": 1, "b": 2}} <tool_call> </tool_call> <think> </think> result of the call
"""
ASSETS = Path(__file__).parents[1] / "assets" / "chat_templates"
FAMILIES = {
    "plain": (["<|endoftext|>"], {"eos_token": "<|endoftext|>"}),
    "chatml": (["<|im_start|>", "<|im_end|>", "<|pad|>"], {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}),
    "qwen3": (["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "tagged": (["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "llama3": (
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "glm": (
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        {"eos_token": "<|endoftext|>"},
    ),
}


def make(folder: Path, family: str, template: str | None = None) -> Path:
    """Make a folder such as AutoTokenizer reads, with `template` instead of the family's."""
    special, names = FAMILIES[family]
    file = ASSETS / f"{family}.jinja"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(_tokenizer(tuple(special), family == "llama3"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template or file.exists():
        (folder / "chat_template.jinja").write_text(template or file.read_text())
    return folder


@functools.cache
def _tokenizer(special: tuple[str, ...], trims: bool) -> str:
    """Make a tokenizer. One that `trims` is like Llama 3's.

    Its post-processor takes spaces out of the characters of a token, and adds a beginning.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, **options))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    if trims:
        bos = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return tokenizer.to_str()
