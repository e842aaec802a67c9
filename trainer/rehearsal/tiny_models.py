"""Tiny models with random weights, their tokenizer, and data that they learn; trainer/tiny.py is the command.

The models have the structure of the released ones but not their proportions: nothing measured on them says anything
about speed or memory. DeepSeek-V3's multi-token prediction is not covered.
The texts are in tiny_texts.yaml. The files are written without transformers, whose model classes take 20 s and more to
import on a small machine.
"""

import json
import random
import re
import zlib
from pathlib import Path
from typing import Any

import yaml

from conf import families
from conf.families.parts.family import Config
from conf.model_facts import shapes
from conf.model_files import config_json, quantization
from trainer.weights.drawn.new_folder import new_folder

KINDS = families.tiny()

EOS, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = [EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>"]  # their ids are 0 to 4
TEXTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("tiny_texts.yaml").read_text("utf-8"))
WORDS = TEXTS["words"].split()


def write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Make a byte-level BPE with exactly `vocab_size` tokens, which encodes and decodes any text without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings: Config = dict(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    trainer = trainers.BpeTrainer(**settings, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXTS["tokenizer_text"], TEXTS["words"]], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "tokenizer_text is too short for that many merges"
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(eos_token=EOS, pad_token=PAD, additional_special_tokens=SPECIAL_TOKENS[2:])
    limits = dict(model_max_length=1024, clean_up_tokenization_spaces=False)
    write_json(folder / "tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast") | names | limits)
    (folder / "chat_template.jinja").write_text(TEXTS["chat_template"])


def draw_tensor(name: str, shape: tuple[int, ...], dtype, seed: int, centre: float | None = None):
    """Draw a tensor from its name: kinds that share a tensor share its values.

    A spread of 0.08 gives logits of about unit spread at this width. Norm weights, biases and the router's correction
    spread by 0.2 around the value of a missing vector (1 or 0): a lost or swapped vector then changes the logits. Sinks
    are scores, and spread like scores.
    """
    import torch

    if ".embed_tokens." in name or ".shared_head.head." in name:  # the releases repeat the model's own in those layers
        name = "lm_head.weight" if "head" in name else "model.embed_tokens.weight"
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise  # float32 in every release
    if centre is not None or re.search(r"(norm|\.ln_[12f])\.weight$", name):
        return ((1 if centre is None else centre) + 0.2 * noise).to(dtype)
    if name.endswith(".sinks"):
        return noise.to(dtype)
    return ((0.2 if name.endswith("bias") else 0.08) * noise).to(dtype)


STACKS = ("experts.gate_up_proj", "experts.down_proj")  # of gpt-oss: all experts of a layer
# As in releases, not the few rows of in_proj_ba, in_proj_a and in_proj_b.
QUANTISED = re.compile(r"(?<!\.eh)_proj(_qkvz?|_z)?\.weight$")
FUSED = re.compile(r"\b(q|k|v|gate|up)(?=_proj\.weight$)")


def quantise(config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors in the format of the release's quantization_config. The head and routers stay unquantised.

    As in releases, weights that are computed as one product share NVFP4's factor.
    """
    import torch

    from trainer.weights.quantised import e2m1, pack

    scheme = quantization.scheme(config)
    if scheme is None:
        return tensors
    found, tops = {}, {}
    for name, tensor in tensors.items():
        together = FUSED.sub("", name)
        tops[together] = max(tops.get(together, torch.tensor(0.0)), tensor.abs().max().float())
    for name, tensor in tensors.items():
        if scheme.stacked and name.endswith(STACKS):
            each = [e2m1.mxfp4(expert.t()) for expert in tensor]
            found[name + scheme.codes] = torch.stack([codes.unflatten(1, (-1, 16)) for codes, _ in each])
            found[name + scheme.scales] = torch.stack([scales for _, scales in each])
            continue
        if scheme.stacked or not QUANTISED.search(name):
            found[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        codes, scales = stem + scheme.codes, stem + scheme.scales
        if scheme.factor:
            found[codes], found[scales], factor = e2m1.nvfp4(tensor, tops[FUSED.sub("", name)])
            found[stem + scheme.factor] = 1 / factor.reshape(1) if scheme.divides else factor
            found[stem + (".input_global_scale" if scheme.divides else ".input_scale")] = torch.tensor([1.0])
            continue
        found[codes], found[scales] = pack.pack(quantization.Packed(scheme, tuple(tensor.shape), codes, scales), tensor)
        found |= {stem + ending: torch.tensor(tensor.shape) for ending in scheme.besides}
    return found


def make_model(kind: str, folder: str | Path, seed: int = 0, dtype: str = "bfloat16", block: int = 0) -> None:
    """Write the checkpoint folder of one of KINDS, also quantised. Raises a Fault if `folder` holds anything.

    `block` is another size of blocks than quantization.OF_TINY has.
    """
    import torch
    from safetensors.torch import save_file

    kind, form = quantization.of_tiny(kind)
    tokens = dict(bos_token_id=None, eos_token_id=SPECIAL_TOKENS.index(EOS), pad_token_id=SPECIAL_TOKENS.index(PAD))
    config: Config = families.tiny()[kind] | tokens | dict(dtype=dtype)
    config |= {quantization.KEY: quantization.OF_TINY[form]} if form else {}
    if block:
        config[quantization.KEY] = config[quantization.KEY] | dict(weight_block_size=[block, block])
    own, kind = families.of(config), getattr(torch, dtype)
    tensors = {name: draw_tensor(name, s, kind, seed, own.constant(name)) for name, s in shapes(config).items()}
    tensors = quantise(config, tensors)
    names = list(tensors)
    # Two shards, because an export has to follow the index of the checkpoint that it started from.
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    metadata = dict(total_size=sum(tensor.nbytes for tensor in tensors.values()))
    with new_folder(folder) as partial:
        make_tokenizer(partial, config_json.of_text(config)["vocab_size"])
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", tokens)
        write_json(partial / "model.safetensors.index.json", dict(metadata=metadata, weight_map=weight_map))
        for shard, part in shards.items():
            save_file({name: tensors[name] for name in part}, partial / shard, metadata={"format": "pt"})


def make_data(folder: str | Path, rows: int = 512, seed: int = 0) -> None:
    """Write `rows` examples for training and an eighth as many for validation: sums, and up to 48 words to repeat."""
    rng = random.Random(seed)
    answers: dict[str, str] = {}  # by question: none occurs twice
    while len(answers) < rows + max(1, rows // 8):
        if rng.random() < 0.5:
            a, b = rng.randrange(100), rng.randrange(100)
            answers[f"What is {a} + {b}?"] = str(a + b)
        else:
            words = " ".join(rng.choices(WORDS, k=rng.randint(1, 48)))
            answers[f"Repeat the words: {words}"] = words
    lines = [json.dumps(dict(input=question, output=answer)) + "\n" for question, answer in answers.items()]
    with new_folder(folder) as partial:
        (partial / "training.jsonl").write_text("".join(lines[:rows]))
        (partial / "validation.jsonl").write_text("".join(lines[rows:]))
