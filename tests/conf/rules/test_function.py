"""conf/rules/function.py: keys of config.json that would not reach Megatron's model are named; those of releases
pass."""

import ast
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from conf import families
from conf.model_facts import MODELS
from conf.rules.conversion import obstacles
from conf.rules.function import BRIDGE, FIRST_DENSE, LEFT, OF_LAYERS, WINDOWS, unread
from trainer.rehearsal.tiny_models import KINDS

# What releases say beside their sizes.
TOKENS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4, "use_cache": True, "torch_dtype": "bfloat16"}
COMMON = TOKENS | {"transformers_version": "4.51.0", "initializer_range": 0.02, "attention_dropout": 0.0}
COMMON |= {"hidden_act": "silu", "attention_bias": False, "rope_scaling": None, "rope_theta": 1000000, "head_dim": 128}
WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 94}
ROUTED = {"norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
RELEASES = {
    "Llama 3.1": ("llama", {"mlp_bias": False, "pretraining_tp": 1, "model_max_length": 131072}),
    "Llama 3.1, scaled": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "Llama, by unsloth": ("llama", {"unsloth_fixed": True, "_name_or_path": "x", "auto_map": {"AutoConfig": "y.Z"}}),
    "Qwen3-MoE": ("qwen3-moe", WINDOWED | ROUTED | {"sliding_window": None, "mlp_only_layers": []}),
    "Qwen3-MoE, by transformers 5": ("qwen3-moe", WINDOWED | ROUTED | {"layer_types": 4 * ["full_attention"]}),
    "Qwen3": ("qwen3", WINDOWED | {"sliding_window": None, "tie_word_embeddings": True}),
    "Mistral 7B v0.1": ("mistral", {"sliding_window": 4096}),
    "Mixtral": ("mixtral", {"sliding_window": None, "router_jitter_noise": 0.0, "output_router_logits": False}),
    "Qwen2-57B-A14B": ("qwen2-moe", WINDOWED | ROUTED | {"norm_topk_prob": False, "mlp_only_layers": []}),
    "GLM-4.5": ("glm4-moe", ROUTED | {"attention_bias": True, "partial_rotary_factor": 0.5, "topk_group": 1}),
    "DeepSeek-V3": (
        "deepseek-v3",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "ep_size": 1, "aux_loss_alpha": 0.001}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True, "moe_layer_freq": 1, "head_dim": 32}
        | {
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
    ),
}
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
GPT_OSS_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
RELEASES["gpt-oss"] = (
    "gpt-oss",
    {"rope_scaling": GPT_OSS_YARN, "attention_bias": True, "initial_context_length": 4096, "experts_per_token": 2}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "head_dim": 64},
)
GEMMA = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000, "sliding_window": 1024}
GEMMA |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 168}
RELEASES["Gemma 3"] = ("gemma3-text", GEMMA | {"sliding_window_pattern": 6, "cache_implementation": "hybrid"})
OLMOE = {"architectures": ["OlmoeForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN_OF_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARNED = YARN_OF_QWEN | {"beta_fast": 32.0, "beta_slow": 1.0}
# What transformers computes by, and Megatron would not: tests/trainer/test_function.py has how far off the logits are.
LOST = [
    (KINDS["qwen3-moe"], {"use_sliding_window": True}, "use_sliding_window is true, but Megatron-Bridge builds"),
    (KINDS["qwen3-moe"], {"layer_types": ["sliding_attention"]}, 'layer_types is ["sliding_attention"], but'),
    (
        KINDS["qwen3-moe"],
        {"rope_scaling": LINEAR},
        'rope_scaling.rope_type is "linear", which Megatron-Bridge does not',
    ),
    (KINDS["qwen3-moe"], {"rope_parameters": LINEAR}, 'rope_parameters.rope_type is "linear", which'),
    (KINDS["qwen3-moe"], {"rope_parameters": YARN_OF_QWEN}, "rope_parameters.beta_fast is absent, but the defaults"),
    (KINDS["qwen3-moe"], {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, which"),
    (KINDS["qwen3-moe"], {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but Megatron makes the weights"),
    (KINDS["qwen3-moe"], {"hidden_act": "gelu"}, 'hidden_act is "gelu", but Megatron-Bridge builds'),
    (KINDS["qwen3"], {"attention_bias": True}, "attention_bias is true, but Megatron-Bridge builds Qwen3ForCausalLM"),
    (KINDS["qwen3"], {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is true, but"),
    (KINDS["qwen3"], {"rope_scaling": YARN_OF_QWEN}, "rope_scaling.beta_fast is absent, but the defaults"),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0, but Megatron-Bridge builds OlmoeForCausalLM with null only"),
    (OLMOE, {"norm_topk_prob": True}, "norm_topk_prob is true, but Megatron-Bridge builds"),
    (OLMOE, {"num_key_value_heads": 4}, "num_key_value_heads is 4, but Megatron-Bridge builds"),
    (KINDS["mixtral"], {"sliding_window": 4096}, "sliding_window is 4096, but Megatron-Bridge builds"),
    (KINDS["mixtral"], {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but"),
    (KINDS["mixtral"], {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but Megatron makes the weights"),
    (KINDS["mixtral"], {"attention_bias": True}, "attention_bias is true, which Megatron-Bridge does not read"),
    (KINDS["qwen2-moe"], {"use_sliding_window": True}, "use_sliding_window is true, but"),
    (KINDS["qwen2-moe"], {"hidden_act": "gelu"}, 'hidden_act is "gelu", but'),
    (
        KINDS["qwen2-moe"],
        {"norm_topk_prob": True, "num_experts_per_tok": 1},
        "num_experts_per_tok is 1, but Megatron makes the weights",
    ),
    (KINDS["gpt2"], {"activation_function": "gelu"}, 'activation_function is "gelu", but Megatron-Bridge builds'),
    (KINDS["gpt2"], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true, but"),
    (KINDS["gpt2"], {"scale_attn_weights": False}, "scale_attn_weights is false, but"),
    (KINDS["gpt2"], {"rope_parameters": LINEAR}, 'rope_parameters is {"rope_type": "linear"'),
    (KINDS["llama"], {"mlp_bias": True}, "mlp_bias is true, but"),
    (KINDS["llama"], {"rope_scaling": LLAMA3}, "rope_scaling.original_max_position_embeddings is absent, but"),
    (
        KINDS["llama"],
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0, "original_max_position_embeddings": 8192}},
        "rope_scaling.low_freq_factor is 2.0, but Megatron computes only with 1",
    ),
    (
        KINDS["llama"],
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, 2.0]}},
        "rope_scaling.rope_type is",
    ),
    (KINDS["glm4-moe"], {"norm_topk_prob": False}, "norm_topk_prob is false, but"),
    (KINDS["glm4-moe"], {"n_group": 4, "topk_group": 2}, "topk_group is 2, but Megatron would rank the 4 groups"),
    (KINDS["glm4-moe"], {"partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor is 0.5, but"),
    (KINDS["deepseek-v3"], {"rope_interleave": False}, "rope_interleave is false, but"),
    (KINDS["glm4-moe-lite"], {"rope_interleave": False}, "rope_interleave is false, but"),
    (KINDS["glm4-moe-lite"], {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, but Megatron-Bridge builds"),
    (KINDS["glm4-moe-lite"], {"mlp_layer_types": 4 * ["sparse"]}, 'mlp_layer_types is ["sparse", "sparse"'),
    (KINDS["glm4-moe-lite"], {"rope_parameters": YARN_OF_QWEN}, 'rope_parameters.rope_type is "yarn", which'),
    (
        KINDS["minimax-m2"],
        {"attn_type_list": [1, 0, 1, 1]},
        "attn_type_list is [1, 0, 1, 1], but Megatron-Bridge builds",
    ),
    (KINDS["minimax-m2"], {"shared_intermediate_size": 64}, "shared_intermediate_size is 64, but Megatron-Bridge"),
    (KINDS["minimax-m2"], {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but Megatron makes the weights"),
    (KINDS["mistral"], {"rope_scaling": YARN}, 'rope_scaling.rope_type is "yarn", which Megatron-Bridge does not'),
    (KINDS["qwen2"], {"use_sliding_window": True}, "use_sliding_window is true, but"),
    (
        KINDS["deepseek-v3"],
        {"rope_scaling": YARN | {"mscale": 1.0}},
        "rope_scaling.mscale is present without mscale_all",
    ),
    (KINDS["deepseek-v3"], {"rope_scaling": YARN | {"attention_factor": 2.0}}, "rope_scaling.attention_factor is 2.0"),
    (KINDS["deepseek-v3"], {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate is false, but"),
    (
        KINDS["llama"],
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0, which Megatron-Bridge does not",
    ),
    (
        KINDS["mixtral"],
        {"is_causal": False},
        "is_causal is false, but Megatron-Bridge builds MixtralForCausalLM with true",
    ),
    (KINDS["gpt2"], {"is_causal": False}, "is_causal is false, but"),
    (
        KINDS["qwen2"],
        {"rope_scaling": YARNED | {"attention_factor": 1.0}},
        "rope_scaling.attention_factor is 1.0",
    ),
    (KINDS["qwen3"], {"rope_scaling": YARNED | {"type": "default"}}, 'rope_scaling.type is "default", which Megatron-'),
    (
        KINDS["gpt-oss"],
        {"swiglu_limit": 5.0},
        "swiglu_limit is 5.0, but Megatron-Bridge builds GptOssForCausalLM with 7",
    ),
    (KINDS["gpt-oss"], {"layer_types": 4 * ["full_attention"]}, 'layer_types is ["full_attention", "full_attention",'),
    (KINDS["gpt-oss"], {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is"),
    (KINDS["gpt-oss"], {"experts_per_token": 4}, "experts_per_token is 4, but Megatron-Bridge builds"),
    (KINDS["gpt-oss"], {"rope_parameters": GPT_OSS_YARN | {"factor": 8.0}}, "rope_parameters.factor is 8.0, but"),
    (KINDS["gpt-oss"], {"rope_parameters": None}, 'rope_parameters.rope_type is "default", which'),
    (KINDS["gpt-oss"], {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but Megatron makes the weights"),
    (
        KINDS["gemma3-text"],
        {"rope_parameters": LINEAR},
        "rope_parameters.factor is 4.0, but transformers reads objects",
    ),
    (
        KINDS["gemma3-text"],
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling.rope_type is absent, but the defaults",
    ),
    (KINDS["llama"], {"use_new_trick": True}, "use_new_trick is true, which"),
    (KINDS["llama"], {"trick": {"kind": 1}}, 'trick is {"kind": 1}, which'),
]


@pytest.mark.parametrize("name", sorted(file.stem for file in MODELS.glob("*.json")))
def test_every_model_of_this_repository_passes(name):
    config = json.loads((MODELS / f"{name}.json").read_text())["config"]
    assert obstacles(config) == []


@pytest.mark.parametrize("kind", families.tiny())
def test_every_tiny_model_passes(kind):
    assert obstacles(families.tiny()[kind]) == []


@pytest.mark.parametrize("name", RELEASES)
def test_what_releases_say_passes(name):
    kind, says = RELEASES[name]
    config = {key: value for key, value in KINDS[kind].items() if key != "rope_parameters"}
    assert unread(config | COMMON | says) == []
    assert unread(KINDS[kind]) == []


def test_a_name_that_transformers_5_writes_is_read():
    config = {key: value for key, value in KINDS["qwen3-moe"].items() if key != "num_experts"}
    assert unread(config | {"num_local_experts": 4}) == []
    assert unread(config)[0].startswith("num_experts is absent")
    assert unread(config | {"num_local_experts": None})[0].startswith("num_local_experts is null")


def test_what_releases_of_gpt2_say_passes():
    says = {"n_ctx": 1024, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "summary_type": "cls_index"}
    says |= {"summary_use_proj": True, "summary_proj_to_labels": True, "summary_first_dropout": 0.1, "n_inner": None}
    says |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    assert unread(KINDS["gpt2"] | TOKENS | says) == []
    assert unread(KINDS["gpt2"] | {"n_ctx": 512})[0].startswith("n_ctx is 512, but Megatron-Bridge builds")


@pytest.mark.parametrize("config, change, says", LOST, ids=[f"{c['architectures'][0]} {k}" for c, k, _ in LOST])
def test_what_would_be_lost_is_named(config, change, says):
    found = unread(config | change)
    assert found and found[0].startswith(says), found
    assert unread(config | change, [line.partition(" ")[0].partition(".")[0] for line in found]) == []


@pytest.mark.parametrize(
    "kind, key", [("mistral", "sliding_window"), ("minimax-m2", "rotary_dim"), ("gpt-oss", "head_dim")]
)
def test_a_key_whose_absence_says_something_else_in_transformers_has_to_be_there(kind, key):
    config = {name: value for name, value in KINDS[kind].items() if name != key}
    assert unread(config) == [f"{key} is absent, but the defaults of transformers and Megatron-Bridge differ; add it"]
    assert unread(config, [key]) == []


@pytest.mark.parametrize("value", [None, False, 0, 0.0, 1, 1.0, "", "text", [], {}])
def test_an_unknown_key_that_says_nothing_passes(value):
    assert unread(KINDS["llama"] | {"embedding_multiplier": value}) == []


def sources(package: str, *files: str) -> str:
    (folder,) = find_spec(package).submodule_search_locations
    return "\n".join((Path(folder) / file).read_text() for file in files)


@pytest.mark.parametrize("name", [name for name, family in families.every().items() if not family.read_as])
def test_the_tables_know_every_key_of_transformers(name):
    """Of the class's own fields, read as text: to import transformers takes seconds."""
    model = name.removesuffix("_text")
    tree = ast.parse(sources("transformers", f"models/{model}/configuration_{model}.py"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    config = next(one for one in classes if f"model_type = '{name}'" in map(ast.unparse, one.body))
    keys = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    family = families.every()[name]
    known = {*family.read, *family.assumed, *family.repeats, *LEFT, *WINDOWS, *OF_LAYERS, FIRST_DENSE}
    assert len(keys) > 15 and keys - known == set()


def test_the_tables_were_read_from_the_installed_bridge():
    assert version("megatron-bridge") == BRIDGE, (
        "read conf/rules/function.py against this release, and run its slow tests"
    )
