"""What conf/rules/function.py lets pass is the same function in Megatron, and what it refuses as lost is another one.

Models of every family are drawn with keys that are not the default. Rows that differ go through transformers' model
and through Megatron-Bridge's, of the same weights, in fp32. One process of each asks all of them: 8 minutes; with
-k "qwen3 and not moe" those of one family alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import families
from conf.model_facts import facts_from_hf
from conf.rules.function import unread
from tests.support import drawn_models
from trainer.rehearsal.tiny_models import KINDS

RANKS = Path(__file__).parents[1] / "support" / "ranks"
BOUND = 1e-4  # of the largest logit; what is found is 2e-6 and less
TOKENS = drawn_models.tokens(rows=2, length=48, vocabulary=500)
OTHERS = {kind: KINDS[kind] for kind in ("kimi-k2", "gpt2")}  # that share few keys with the rest
FAMILIES: dict[str, dict[str, Any]] = {
    kind: families.as_text(config)
    for kind, config in KINDS.items()
    if not kind.endswith("-mtp") and kind not in ("gemma3", "gemma4", *OTHERS)
}
LATENT = ("deepseek-v3", "glm4-moe-lite")
EXPERTS = (
    "glm4-moe",
    "deepseek-v3",
    "qwen3-moe",
    "olmoe",
    "mixtral",
    "qwen2-moe",
    "glm4-moe-lite",
    "minimax-m2",
    "gpt-oss",
    "nemotron-h",
)
SIGMOID = ("glm4-moe", "deepseek-v3", "glm4-moe-lite", "nemotron-h")
WITH_YARN = ("deepseek-v3", "qwen3-moe", "llama", "qwen3", "qwen2", "olmoe", "mixtral", "qwen2-moe")


def rope(kind: str = "default", **keys: float | bool | str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **keys}}


def yarn(**keys: float | bool | str) -> dict[str, Any]:
    return rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, **keys)


def llama3(**keys: float) -> dict[str, Any]:
    usual = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return rope("llama3", **usual | keys)


def by_layers(local: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"sliding_attention": local, "full_attention": other}}


LOCAL, WIDE = KINDS["gemma4-text"]["rope_parameters"].values()
# What the small models of Gemma 4 have.
SMALL = {"enable_moe_block": False, "hidden_size_per_layer_input": 16, "attention_k_eq_v": False}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
HEAD_DIM = ("glm4-moe", "qwen3-moe", "llama", "qwen3", "qwen2", "mixtral", "qwen2-moe", "mistral")
WHOLE = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = rope("linear", factor=4.0)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWED = ("gpt-oss", "gemma3-text", "gemma4-text")
OWN_ROPE = ("glm4-moe", *WINDOWED)  # whose keys of rotary embeddings are not those of the rest
GPT_OSS_YARN = KINDS["gpt-oss"]["rope_parameters"]
NEMOTRONS = ("nemotron-h", "nemotron-h-latent")
MOE_SHARED = "moe_shared_expert_intermediate_size"
NORMED = {"norm_topk_prob": True}
NO_MATTER = {"initializer_range": 0.5, "attention_dropout": 0.3, "use_cache": False, "pretraining_tp": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
# Of a family, what is read: everything at its default, and every key away from it.
READ = [
    *((family, {}) for family in FAMILIES),
    *((family, NO_MATTER | {"sliding_window": None}) for family in FAMILIES if family not in WINDOWED),
    *((family, rope(rope_theta=100.0)) for family in FAMILIES if family not in OWN_ROPE),
    *((family, {"rope_parameters": None, "rope_theta": 50.0}) for family in FAMILIES if family != "gpt-oss"),
    *((family, {"rope_theta": 50.0} | rope(rope_theta=100.0)) for family in FAMILIES if family not in OWN_ROPE),
    *((family, {"rms_norm_eps": 0.3}) for family in FAMILIES),
    *((family, HEADS) for family in FAMILIES if family not in (*LATENT, "olmoe")),
    *(
        (family, {"tie_word_embeddings": True})
        for family in ("qwen3-moe", "llama", "qwen2", "mixtral", "qwen2-moe", "mistral", "minimax-m2")
    ),
    *((family, {}) for family in OTHERS),
    ("minimax-m2", {"rotary_dim": 16}),
    ("olmoe", HEADS | {"num_key_value_heads": 2, "head_dim": 64}),
    ("qwen3", {"tie_word_embeddings": False}),
    *((family, {"head_dim": 16}) for family in HEAD_DIM),
    *((family, {"num_experts_per_tok": 3, "n_group": 1}) for family in EXPERTS),
    *((family, {"router_aux_loss_coef": 0.5, "output_router_logits": False}) for family in EXPERTS),
    *((family, {"routed_scaling_factor": 0.7}) for family in SIGMOID),
    *((family, {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}) for family in SIGMOID),
    *((family, {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 3}) for family in SIGMOID),
    *((family, {"first_k_dense_replace": layers}) for family in SIGMOID[:2] for layers in (0, 2)),
    *((family, yarn()) for family in WITH_YARN),
    *((family, yarn(mscale=0.7, mscale_all_dim=1.3)) for family in WITH_YARN),
    ("glm4-moe", {"attention_bias": False}),
    ("glm4-moe", {"use_qk_norm": False}),
    ("glm4-moe", {"partial_rotary_factor": 0.25} | rope()),
    *((family, {"n_shared_experts": 2}) for family in LATENT),
    *((family, {"qk_nope_head_dim": 16, "v_head_dim": 48}) for family in LATENT),
    *((family, {"num_attention_heads": 2, "num_key_value_heads": 2}) for family in LATENT),
    ("deepseek-v3", rope()),
    ("qwen3-moe", {"norm_topk_prob": False}),
    ("qwen3-moe", {"moe_intermediate_size": 96}),
    *((family, {"use_sliding_window": False, "sliding_window": 8}) for family in ("qwen3-moe", "qwen3", "qwen2")),
    ("mistral", {"sliding_window": 8}),
    ("mixtral", {"head_dim": None}),
    ("mixtral", {"intermediate_size": 96}),
    ("qwen2-moe", {"head_dim": None}),
    ("qwen2-moe", {"qkv_bias": False}),
    ("qwen2-moe", {"norm_topk_prob": True}),
    ("qwen2-moe", {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 48}),
    ("qwen2-moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("qwen2-moe", {"num_experts_per_tok": 1}),
    ("gpt-oss", NO_MATTER),
    ("gpt-oss", {"rope_parameters": GPT_OSS_YARN | {"rope_theta": 100.0}}),
    ("gpt-oss", {"rope_parameters": None, "rope_scaling": GPT_OSS_YARN, "rope_theta": 50.0}),
    ("gpt-oss", {"layer_types": None, "sliding_window": 3}),
    ("gpt-oss", {"head_dim": 16}),
    # hidden_size is 128: neither shape nor size says which side is which
    *(("gpt-oss", {"intermediate_size": width}) for width in (64, 96)),
    ("gemma3-text", NO_MATTER | {"attn_logit_softcapping": 1.0}),
    *(("gemma3-text", {key: "silu"}) for key in ("hidden_act", "hidden_activation")),
    ("gemma3-text", {"layer_types": None, "num_hidden_layers": 3}),
    ("gemma3-text", by_layers({"rope_theta": 50.0}, {}) | {"num_hidden_layers": 7}),
    ("gemma3-text", {"layer_types": None, "sliding_window": 3, "query_pre_attn_scalar": 64, "head_dim": 16}),
    ("gemma3-text", {"layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]}),
    ("gemma3-text", by_layers({"rope_theta": 50.0}, {"rope_theta": 70.0})),
    ("gemma3-text", {"rope_parameters": None, "rope_local_base_freq": 50.0} | SCALED),
    ("gemma4-text", NO_MATTER | {"use_bidirectional_attention": "vision"}),
    ("gemma4-text", {"final_logit_softcapping": 1.0, "sliding_window": 3, "tie_word_embeddings": False}),
    ("gemma4-text", {"final_logit_softcapping": None, "num_global_key_value_heads": 1, "top_k_experts": 1}),
    ("gemma4-text", {"attention_k_eq_v": False, "num_global_key_value_heads": None, "global_head_dim": 48}),
    ("gemma4-text", {"layer_types": ["full_attention", *["sliding_attention"] * 3], "top_k_experts": 3}),
    ("gemma4-text", {"layer_types": None, "num_hidden_layers": 7, "moe_intermediate_size": 96}),
    ("gemma4-text", by_layers(LOCAL | {"rope_theta": 50.0}, WIDE | {"partial_rotary_factor": 0.5, "factor": 4.0})),
    ("gemma4-text", SMALL | {"hidden_activation": "silu"}),
    ("gemma4-text", SMALL | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ("gemma4-text", {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1}),
    *(("qwen3-5", rope(partial_rotary_factor=share)) for share in (0.25, 0.5)),
    ("qwen3-5", {"layer_types": ["full_attention", "linear_attention"] * 2}),
    ("qwen3-5", {"linear_num_value_heads": 2, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}),
    ("qwen3-5-moe", {"num_experts_per_tok": 3, "layer_types": None, "full_attention_interval": 2}),
    ("qwen3-5-moe", {"shared_expert_intermediate_size": 48}),
    *(("nemotron-h", {"layer_norm_epsilon": 0.3} | LINEAR | {older: 7}) for older in ("norm_eps", "mamba_chunk_size")),
    *(("nemotron-h", {key: 0.3, "time_step_max": 0.01}) for key in ("time_step_min", "mamba_dt_min")),
    ("nemotron-h", {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 24, "conv_kernel": 3}),
    ("nemotron-h", {"mamba_n_groups": 1, "mamba_d_conv": 2, "expand": 3, "head_dim": 15}),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "-MM*E*-", "num_hidden_layers": 7}),
    *(("nemotron-h", {"layers_block_type": [kind, "attention", "mamba"]}) for kind in ("mamba", "mlp", "moe")),
    ("nemotron-h", {"hybrid_override_pattern": "M", "num_nextn_predict_layers": 1, "chunk_size": 16}),
    ("nemotron-h-latent", {"moe_latent_size": 24, "moe_intermediate_size": 40, MOE_SHARED: 72, "intermediate_size": 7}),
    ("llama", LINEAR),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e4}),
    *(("llama", llama3(factor=factor)) for factor in (4.0, 32.0)),
    ("olmoe", {"intermediate_size": 96}),
    *(("qwen3-moe", rope("yarn", **WHOLE, truncate=truncate)) for truncate in (True, False)),
]
OTHER_YARNS = ({"factor": 4.0}, {"original_max_position_embeddings": 16}, {"beta_fast": 4.0}, {"attention_factor": 1.0})
# What Bridge drops, or reads otherwise than transformers.
LOST = [
    *((family, WINDOW) for family in ("qwen3-moe", "qwen3", "qwen2", "qwen2-moe")),
    ("mixtral", {"sliding_window": 8}),
    ("minimax-m2", {"num_experts_per_tok": 1}),
    ("glm4-moe-lite", {"first_k_dense_replace": 2}),
    ("glm4-moe-lite", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}),
    ("glm4-moe-lite", {"rope_interleave": False}),
    *((family, {"num_experts_per_tok": 1} | NORMED) for family in ("mixtral", "qwen2-moe")),
    *((family, LINEAR) for family in FAMILIES if family not in ("llama", "gemma3-text", "gemma4-text", *NEMOTRONS)),
    *((family, llama3()) for family in ("qwen3-moe", "qwen3", "qwen2", "glm4-moe", "mixtral", "qwen2-moe")),
    *((family, {"partial_rotary_factor": 0.25}) for family in ("glm4-moe", "qwen3-moe", "qwen3", "qwen2", "mixtral")),
    *((family, {"norm_topk_prob": False}) for family in SIGMOID),
    *((family, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}) for family in SIGMOID),
    *((family, {"n_group": 4, "topk_group": 2}) for family in SIGMOID),
    ("glm4-moe", yarn()),
    ("glm4-moe", rope(partial_rotary_factor=0.25)),
    ("deepseek-v3", {"rope_interleave": False}),
    *(("deepseek-v3", yarn(**{key: 0.7})) for key in ("mscale", "mscale_all_dim", "attention_factor")),
    ("deepseek-v3", rope("yarn", **WHOLE, truncate=False)),
    ("qwen3-moe", {"attention_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("llama", llama3(original_max_position_embeddings=64)),
    ("llama", llama3(low_freq_factor=2.0, high_freq_factor=16.0)),
    *((family, {"is_causal": False}) for family in (*FAMILIES, *OTHERS)),
    *((family, yarn(attention_factor=1.0)) for family in WITH_YARN if family != "deepseek-v3"),
    *((family, yarn(type="default")) for family in ("qwen3-moe", "qwen3", "llama")),
    *(("gpt-oss", {"rope_parameters": GPT_OSS_YARN | change}) for change in OTHER_YARNS),
    ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("gpt-oss", {"attention_bias": False}),
    ("gpt-oss", {"tie_word_embeddings": True}),
    ("gemma3-text", by_layers({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, {"rope_theta": 1e4})),
    ("gemma3-text", {"layer_types": ["full_attention"] * 8}),
    ("gemma3-text", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("gemma3-text", {"final_logit_softcapping": 1.0}),
    ("gemma3-text", {"sliding_window_pattern": 2}),
    ("gemma3-text", {"use_bidirectional_attention": True}),
    ("gemma3-text", {"tie_word_embeddings": False}),
    *(("nemotron-h-latent", {key: True}) for key in ("use_bias", "mlp_bias")),
    *(("nemotron-h", {key: False}) for key in ("use_conv_bias", "mamba_conv_bias")),
    *(("nemotron-h-latent", {f"{part}_hidden_act": "gelu"}) for part in ("mlp", "mamba")),
    ("gemma4-text", {"use_bidirectional_attention": "all"}),
    ("gemma4-text", {"attention_bias": True}),
    ("gemma4-text", by_layers(LOCAL | {"rope_type": "linear", "factor": 4.0}, WIDE)),
    ("olmoe", {"clip_qkv": 0.3}),
    ("olmoe", {"norm_topk_prob": True}),
]


def name(family: str, change: dict[str, Any]) -> str:
    return f"{family} {json.dumps(change)}"


def config(family: str, change: dict[str, Any]) -> dict[str, Any]:
    keys = (FAMILIES | OTHERS)[family] | change
    return {key: value for key, value in keys.items() if value is not None or key == "sliding_window"}


@pytest.fixture(scope="module")
def logits(work, configure, megatron_logits, request):
    """By name of a case that is asked for, both models' logits; None of Megatron's where Bridge refuses."""
    asked = {item.callspec.id for item in request.session.items if item.path == request.path}
    cases = [case for case in READ + LOST if name(*case) in asked]
    folders = {name(*case): work / "functions" / str(number) for number, case in enumerate(cases)}
    released, runs = [], {}
    for case, folder in zip(cases, folders.values(), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config(*case) | {"dtype": "float32"}))
        runs[name(*case)] = configure("llama", f"paths.model={folder}", "model.mtp=false")
        released.append(
            {"model": str(folder), "adapter": None, "tokens": TOKENS, "out": f"{folder}/hf.pt", "draw": True}
        )
    subprocess.run([sys.executable, RANKS / "hf_logits.py"], input=json.dumps(released), text=True, check=True)
    return {
        key: (
            torch.load(folder / "hf.pt"),
            (megatron_logits(runs[key], released=f"{folder}/weights", tokens=TOKENS) or {}).get("logits"),
        )
        for key, folder in folders.items()
    }


def difference(pair: tuple[torch.Tensor, torch.Tensor | None]) -> float:
    expected, found = pair
    if found is None:
        return float("inf")
    return float((found[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family, change", READ, ids=[name(*case) for case in READ])
def test_what_passes_is_the_same_function(family, change, logits):
    assert unread(config(family, change)) == []
    assert difference(logits[name(family, change)]) < BOUND


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family, change", LOST, ids=[name(*case) for case in LOST])
def test_what_is_refused_would_have_been_another(family, change, logits):
    """Else the refusal would be superstition."""
    assert unread(config(family, change)) or not understood(config(family, change))
    assert difference(logits[name(family, change)]) > 10 * BOUND


def understood(read: dict[str, Any]) -> bool:
    try:
        facts_from_hf(read)
    except ValueError:  # what Bridge takes for granted of a family
        return False
    return True
