"""Tiny models with random weights, their tokenizer, and data that they learn; trainer/tiny.py is the command.

The models have the structure of the released ones but not their proportions: nothing measured on them says anything
about speed or memory. DeepSeek-V3's multi-token prediction is not covered.
The files are written without transformers, whose model classes take 20 s and more to import on a small machine.
"""

import json
import random
import re
import zlib
from pathlib import Path
from typing import Any

from conf.model_files import quantization
from trainer.weights.drawn.new_folder import new_folder
from trainer.weights.drawn.shapes import model_shapes

Config = dict[str, Any]

# 4 layers split over 4 pipeline stages, or over 2 x 2 virtual ones; 2 key-value heads over 2 tensor ranks; 8 experts
# over 4 expert ranks. A vocabulary of 512 needs no padding. vLLM's CPU attention needs heads of 32 or more.
COMMON: Config = dict(
    num_hidden_layers=4,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=1024,
    hidden_act="silu",
    tie_word_embeddings=False,
)
MOE: Config = dict(moe_intermediate_size=64, num_experts_per_tok=2, norm_topk_prob=True)
SIGMOID_MOE = MOE | dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5)
GLM4_MOE = SIGMOID_MOE | dict(
    model_type="glm4_moe",
    architectures=["Glm4MoeForCausalLM"],
    head_dim=64,  # as in the releases, heads x head_dim is not hidden_size
    attention_bias=True,
    use_qk_norm=True,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5),
    n_group=1,
    topk_group=1,
)
DEEPSEEK_V3 = SIGMOID_MOE | dict(
    model_type="deepseek_v3",
    architectures=["DeepseekV3ForCausalLM"],
    num_key_value_heads=4,  # latent attention has one per query head
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=256)
    | dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    # transformers ranks groups by their best 2 experts, Megatron by their best num_experts_per_tok / topk_group: that
    # quotient has to be 2, as it is in the release.
    n_group=2,
    topk_group=1,
    num_nextn_predict_layers=0,
)
KIMI_K2 = DEEPSEEK_V3 | dict(
    model_type="kimi_k2",
    n_group=1,
    rope_scaling=dict(type="yarn", factor=32.0, original_max_position_embeddings=64)
    | dict(beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    rope_theta=5e4,
)
del KIMI_K2["rope_parameters"]  # the release has the older names
GLM4_MOE_LITE = SIGMOID_MOE | dict(
    model_type="glm4_moe_lite",
    architectures=["Glm4MoeLiteForCausalLM"],
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=64,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=1,
)
QWEN3_MOE = MOE | dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=8,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
QWEN3: Config = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    head_dim=64,
    tie_word_embeddings=True,  # as up to 4B; the larger ones are not
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
QWEN2: Config = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
OLMOE: Config = dict(
    model_type="olmoe",
    architectures=["OlmoeForCausalLM"],
    intermediate_size=64,  # of an expert; every layer has experts
    num_key_value_heads=4,  # as many as heads
    num_experts=8,
    num_experts_per_tok=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
)
MINIMAX_M2: Config = dict(
    model_type="minimax_m2",
    architectures=["MiniMaxM2ForCausalLM"],
    intermediate_size=64,  # of an expert; every layer has experts
    num_local_experts=8,
    num_experts_per_tok=2,
    head_dim=64,
    rotary_dim=32,  # half of a head is turned
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    scoring_func="sigmoid",
    use_routing_bias=True,
    use_qk_norm=True,
)
MISTRAL: Config = dict(
    model_type="mistral",
    architectures=["MistralForCausalLM"],
    head_dim=32,
    sliding_window=None,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
MIXTRAL: Config = dict(
    model_type="mixtral",
    architectures=["MixtralForCausalLM"],
    intermediate_size=64,  # of an expert; every layer has experts
    num_local_experts=8,
    num_experts_per_tok=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
QWEN2_MOE = MOE | dict(
    model_type="qwen2_moe",
    architectures=["Qwen2MoeForCausalLM"],
    num_experts=8,
    norm_topk_prob=False,
    shared_expert_intermediate_size=96,
    mlp_only_layers=[1],  # the releases have none; without one, dense layers would go untried
    qkv_bias=True,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
GPT_OSS: Config = dict(
    model_type="gpt_oss",
    architectures=["GptOssForCausalLM"],
    intermediate_size=128,  # of an expert; as in the releases, no shape tells the sides of down_proj
    num_local_experts=8,
    num_experts_per_tok=2,
    head_dim=32,
    attention_bias=True,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rms_norm_eps=1e-5,
    swiglu_limit=7.0,
    rope_parameters=dict(rope_type="yarn", rope_theta=1.5e5, factor=32.0, original_max_position_embeddings=4096)
    | dict(beta_fast=32.0, beta_slow=1.0, truncate=False),
)
LLAMA: Config = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=500,  # over 2 tensor ranks Megatron pads it to 504
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=5e5),
)
GPT2: Config = dict(
    model_type="gpt2",
    architectures=["GPT2LMHeadModel"],
    n_layer=4,
    n_embd=128,
    n_head=4,
    n_positions=1024,
    vocab_size=500,  # which Megatron pads, as it does the releases' 50257
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)
KINDS: dict[str, Config] = {
    "glm4-moe": COMMON | GLM4_MOE | dict(num_nextn_predict_layers=0),
    "glm4-moe-mtp": COMMON | GLM4_MOE | dict(num_nextn_predict_layers=1),
    "glm4-moe-lite": COMMON | GLM4_MOE_LITE,
    "deepseek-v3": COMMON | DEEPSEEK_V3,
    "kimi-k2": COMMON | KIMI_K2,
    "qwen3-moe": COMMON | QWEN3_MOE,
    "qwen3": COMMON | QWEN3,
    "qwen2": COMMON | QWEN2,
    "olmoe": COMMON | OLMOE,
    "minimax-m2": COMMON | MINIMAX_M2,
    "mistral": COMMON | MISTRAL,
    "mixtral": COMMON | MIXTRAL,
    "qwen2-moe": COMMON | QWEN2_MOE,
    "gpt-oss": COMMON | GPT_OSS,
    "llama": COMMON | LLAMA,
    "gpt2": GPT2,
}

EOS, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = [EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>"]  # their ids are 0 to 4
# The end of text is inside the generation block: it is a token that the assistant has to learn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
WORDS = [
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "marble",
    "needle",
    "orange",
    "pencil",
    "quarry",
    "river",
    "silver",
    "table",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "zebra",
]
TOKENIZER_TEXT = """\
What is 17 + 25? Repeat the words: the answer is 42, and the words are the same as those of the question.
A model reads a sequence of tokens and predicts the next one. A mixture of experts sends each token to a few of its
many experts; the router decides which ones, and the other experts do nothing for that token.
def train(model, batches, optimizer):
    for step, batch in enumerate(batches):
        loss = model(batch["input"], labels=batch["output"])
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    return model
Let f(x) = x^2 + 3x - 4. Then f'(x) = 2x + 3, and f(x) = 0 for x = 1 and x = -4, because (x - 1)(x + 4) = x^2 + 3x - 4.
"""


def write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Make a byte-level BPE with exactly `vocab_size` tokens: any text goes in and comes out again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings: Config = dict(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    trainer = trainers.BpeTrainer(**settings, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TOKENIZER_TEXT, " ".join(WORDS)], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "TOKENIZER_TEXT is too short for that many merges"
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(eos_token=EOS, pad_token=PAD, additional_special_tokens=SPECIAL_TOKENS[2:])
    limits = dict(model_max_length=COMMON["max_position_embeddings"], clean_up_tokenization_spaces=False)
    write_json(folder / "tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast") | names | limits)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def draw_tensor(name: str, shape: tuple[int, ...], dtype, seed: int):
    """Draw a tensor from its name, so that kinds which share a tensor share its values.

    A spread of 0.08 gives logits of about unit spread at this width. Norm weights, biases and the router's correction
    spread by 0.2 around the value that a missing one would have (1 or 0), so that a lost or swapped vector shows. Sinks
    are scores, and spread as scores do.
    """
    import torch

    if ".embed_tokens." in name or ".shared_head.head." in name:  # the releases repeat the model's own in those layers
        name = "lm_head.weight" if "head" in name else "model.embed_tokens.weight"
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise  # float32 in every release
    if re.search(r"(norm|\.ln_[12f])\.weight$", name):
        return (1 + 0.2 * noise).to(dtype)
    if name.endswith(".sinks"):
        return noise.to(dtype)
    return ((0.2 if name.endswith("bias") else 0.08) * noise).to(dtype)


STACKS = ("experts.gate_up_proj", "experts.down_proj")  # of gpt-oss: all experts of a layer
FUSED = re.compile(r"\b(q|k|v|gate|up)(?=_proj\.weight$)")


def quantise(config: Config, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a release in the format of its quantization_config, which all layers have but the head and routers.

    Those that are computed as one share NVFP4's factor, as in releases.
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
        if scheme.kind == "mxfp4" and name.endswith(STACKS):
            each = [e2m1.mxfp4(expert.t()) for expert in tensor]
            found[name + scheme.codes] = torch.stack([codes.unflatten(1, (-1, 16)) for codes, _ in each])
            found[name + scheme.scales] = torch.stack([scales for _, scales in each])
            continue
        if scheme.kind == "mxfp4" or not name.endswith("_proj.weight") or name.endswith("eh_proj.weight"):
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
    """Write the checkpoint folder of one of KINDS, also quantised. Raises FileExistsError if `folder` holds anything.

    `block` is another size of blocks than quantization.OF_TINY has.
    """
    import torch
    from safetensors.torch import save_file

    kind, form = quantization.of_tiny(kind)
    tokens = dict(bos_token_id=None, eos_token_id=SPECIAL_TOKENS.index(EOS), pad_token_id=SPECIAL_TOKENS.index(PAD))
    config: Config = KINDS[kind] | tokens | dict(dtype=dtype)
    config |= {quantization.KEY: quantization.OF_TINY[form]} if form else {}
    if block:
        config[quantization.KEY] = config[quantization.KEY] | dict(weight_block_size=[block, block])
    tensors = {name: draw_tensor(name, s, getattr(torch, dtype), seed) for name, s in model_shapes(config).items()}
    tensors = quantise(config, tensors)
    names = list(tensors)
    # Two shards, because an export has to follow the index of the checkpoint that it started from.
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    metadata = dict(total_size=sum(tensor.nbytes for tensor in tensors.values()))
    with new_folder(folder) as partial:
        make_tokenizer(partial, config["vocab_size"])
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", tokens)
        write_json(partial / "model.safetensors.index.json", dict(metadata=metadata, weight_map=weight_map))
        for shard, part in shards.items():
            save_file({name: tensors[name] for name in part}, partial / shard, metadata={"format": "pt"})


def make_data(folder: str | Path, rows: int = 512, seed: int = 0) -> None:
    """Write `rows` examples for training and an eighth as many for validation: sums, and up to 48 words to repeat."""
    rng = random.Random(seed)
    answers: dict[str, str] = {}  # by question, so that none occurs twice
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
