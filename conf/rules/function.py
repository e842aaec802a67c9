"""Check that Megatron's model computes the function that a config.json describes, by Megatron-Bridge 0.6.2.

    unread(config) -> ["num_experts is ...", ...]      a line for each key that would not reach Megatron's model

Bridge copies the keys that it knows into Megatron's configuration, takes others for granted, and says nothing of the
rest: a sliding window, a clipped query or another kind of rotary scaling is dropped, and every weight still finds its
place. So each key of a config.json is held against these tables:

    READ        arrives with any value
    LEFT        bears on no logit: token ids, dropout, losses of training, how a model is generated from
    ONLY        Bridge does not read it, and computes what one of these values says
    ROTATIONS   the kinds of rotary embeddings, and what is read of each
    OF_ALL      the same of every family: what transformers asks any config.json for
    any other   passes when its value says nothing (null, false, 0, 1, empty), or is text: no model of these computes
                by a text that its transformers class does not declare

A key that is absent, or null, has the default of transformers 5.12. tests/trainer/test_function.py holds each entry
against the logits of transformers, and the tables against its classes.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BRIDGE = "0.6.2"  # the release of Megatron-Bridge that the tables were read from
SIZES = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
SIZES |= {"vocab_size"}
EXPERTS = {"num_experts_per_tok", "moe_intermediate_size"}
SIGMOID_EXPERTS = EXPERTS | {"n_routed_experts", "num_local_experts", "n_shared_experts", "first_k_dense_replace"}
SIGMOID_EXPERTS |= {"routed_scaling_factor", "n_group", "topk_group", "num_nextn_predict_layers", "moe_layer_freq"}
LATENT = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
ROTARY = {"rope_theta", "rope_parameters", "rope_scaling"}
LEFT = {
    *("architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("max_position_embeddings", "model_max_length", "n_positions", "initializer_range", "use_cache", "pretraining_tp"),
    *("attention_dropout", "hidden_dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("output_router_logits", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate"),
    *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
    *("length_penalty", "typical_p", "num_return_sequences", "max_new_tokens", "no_repeat_ngram_size"),
    *("pruned_heads", "torchscript", "tie_encoder_decoder", "use_bfloat16", "output_scores", "qk_head_dim"),
}
PREFIXES = ("_", "unsloth_")  # of what tools note for themselves
OF_LAYERS = {"layer_types": "full_attention", "attn_type_list": 1}  # the one kind of layer that is built
WINDOWS = {"sliding_window", "max_window_layers"}  # say nothing while use_sliding_window is false
SHOWN = 60  # characters of a value
OF_ALL: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,)}  # false: every token attends to those behind it
FIRST_DENSE = "mlp_layer_types"  # of GLM-4.7-Flash
ANY: Any = object()


@dataclass(frozen=True)
class Rotation:
    """A kind of rotary embedding."""

    read: Mapping[str, Any] = field(default_factory=dict)  # ANY, or the only values
    needs: tuple[str, ...] = ()  # written down, as defaults differ
    lost: tuple[str, ...] = ()  # not read, and no value says nothing


@dataclass(frozen=True)
class Family:
    read: Collection[str]
    only: Mapping[str, tuple[Any, ...]]
    rotations: Mapping[str, Rotation]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers', where a rule needs them
    same: Mapping[str, str] = field(default_factory=dict)  # keys that transformers writes, by the key they repeat
    written: tuple[str, ...] = ()  # keys that have to be there, as transformers' default is another function
    filled: tuple[str, ...] = ()  # keys that cannot be null: transformers refuses that, or Megatron-Bridge ignores it
    turns: tuple[str, ...] = ()  # kinds of layers that follow one another, again and again; none: all are alike


DEFAULT = {"default": Rotation()}
LINEAR = {"linear": Rotation({"factor": ANY}, ("factor",))}
YARNS = {"factor": ANY, "original_max_position_embeddings": ANY, "beta_fast": ANY, "beta_slow": ANY}
YARNS |= {"mscale": ANY, "mscale_all_dim": ANY}
GIVEN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
LOST = ("attention_factor",)  # without it cosines and sines are scaled by what follows from factor
YARN = {"yarn": Rotation(YARNS | {"truncate": ANY}, GIVEN, LOST)}
LATENT_YARN = {"yarn": Rotation(YARNS | {"truncate": (True,)}, ("factor",), LOST)}
OF_GPT_OSS = {"factor": (32,), "original_max_position_embeddings": (4096,), "truncate": (False,)}
OF_GPT_OSS |= {"beta_fast": (32,), "beta_slow": (1,)}
GPT_OSS_YARN = {"yarn": Rotation(OF_GPT_OSS, tuple(OF_GPT_OSS), LOST)}
OF_LLAMA3 = {"low_freq_factor": (1,), "high_freq_factor": (4,), "original_max_position_embeddings": (8192,)}
LLAMA3 = {"llama3": Rotation({"factor": ANY} | OF_LLAMA3, ("factor", *OF_LLAMA3))}
PLAIN = SIZES | ROTARY | {"rms_norm_eps", "head_dim", "tie_word_embeddings"}
SILU = {"hidden_act": ("silu",)}  # on a GPU Megatron's fused gelu is another one
QWENS = SILU | {"use_sliding_window": (False,)}
SIGMOID = SILU | {"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
# Keys of sizes that planner and transformers take for other values if they are absent, and that transformers wants.
HEADS = ("num_key_value_heads", "head_dim")
SIGMOID_SIZES = ("first_k_dense_replace", "moe_intermediate_size")
COUNTS = ("n_routed_experts", "n_shared_experts")
GROUPED = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
RANKS = ("q_lora_rank", "kv_lora_rank")  # without the first, the query is one matrix, whose conversion fails
SHARED = "shared_expert_intermediate_size"
FAMILIES = {
    "Glm4MoeForCausalLM": Family(
        PLAIN | SIGMOID_EXPERTS | {"attention_bias", "use_qk_norm", "partial_rotary_factor"},
        SIGMOID,
        DEFAULT,
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5},
        written=(*HEADS, *SIGMOID_SIZES, *COUNTS, "attention_bias", "use_qk_norm"),
        filled=(*HEADS, *SIGMOID_SIZES, *COUNTS, *GROUPED, "use_qk_norm"),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        SIZES | ROTARY | SIGMOID_EXPERTS | LATENT | {"rms_norm_eps", "tie_word_embeddings", "attention_bias"},
        # transformers reads mlp_layer_types, and has one dense layer without it, whatever first_k_dense_replace says
        SIGMOID | {"rope_interleave": (True,), "partial_rotary_factor": (1,), "first_k_dense_replace": (1,)},
        DEFAULT,
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
        {"head_dim": "qk_rope_head_dim"},
        (*SIGMOID_SIZES, *COUNTS, *RANKS),
        (*SIGMOID_SIZES, *COUNTS, *RANKS, *GROUPED, "num_key_value_heads"),
    ),
    "DeepseekV3ForCausalLM": Family(
        SIZES | ROTARY | SIGMOID_EXPERTS | LATENT | {"rms_norm_eps", "tie_word_embeddings", "attention_bias"},
        SIGMOID | {"rope_interleave": (True,)},
        DEFAULT | LATENT_YARN,
        {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        {"head_dim": "qk_rope_head_dim"},
        (*SIGMOID_SIZES, *RANKS),
        (*SIGMOID_SIZES, *RANKS, "routed_scaling_factor"),
    ),
    "Qwen3MoeForCausalLM": Family(
        PLAIN
        | EXPERTS
        | {"num_experts", "num_local_experts", "norm_topk_prob"}
        | {"attention_bias", "decoder_sparse_step", "mlp_only_layers"},
        QWENS,
        DEFAULT | YARN,
        written=("moe_intermediate_size", "num_experts"),
        filled=(*HEADS, "intermediate_size", "moe_intermediate_size", "num_experts", "norm_topk_prob"),
    ),
    "Qwen3ForCausalLM": Family(
        PLAIN, QWENS | {"attention_bias": (False,)}, DEFAULT | YARN, written=HEADS, filled=("head_dim",)
    ),
    "Qwen2ForCausalLM": Family(
        PLAIN | {"attention_bias"}, QWENS, DEFAULT | YARN, written=("num_key_value_heads",), filled=("head_dim",)
    ),
    "LlamaForCausalLM": Family(
        PLAIN, SILU | {"attention_bias": (False,), "mlp_bias": (False,)}, DEFAULT | LINEAR | LLAMA3 | YARN
    ),
    "MistralForCausalLM": Family(
        PLAIN | {"sliding_window"},
        SILU | {"attention_bias": (False,)},
        DEFAULT,
        written=("sliding_window", "num_key_value_heads"),
        filled=("num_key_value_heads",),
    ),
    "MiniMaxM2ForCausalLM": Family(
        PLAIN
        | {"num_local_experts", "num_experts_per_tok", "rotary_dim"}
        | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"},  # the releases hold no tensor of these
        SILU
        | {"router_jitter_noise": (0,), "scoring_func": ("sigmoid",), "use_routing_bias": (True,)}
        | {"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
        DEFAULT,
        {"norm_topk_prob": True},
        # rotary_dim and head_dim are the release's; Megatron-Bridge turns all of a head without
        written=("rotary_dim", *HEADS, "num_local_experts"),
        filled=(*HEADS, "num_local_experts", "rope_theta"),
    ),
    "MixtralForCausalLM": Family(
        PLAIN | {"num_local_experts", "num_experts_per_tok"},
        SILU | {"sliding_window": (None,), "router_jitter_noise": (0,)},
        DEFAULT | YARN,
        {"norm_topk_prob": True},
        written=("num_key_value_heads", "num_local_experts"),
        filled=("num_key_value_heads", "num_local_experts"),
    ),
    "Qwen2MoeForCausalLM": Family(
        PLAIN
        | EXPERTS
        | {"num_experts", SHARED, "norm_topk_prob", "qkv_bias"}
        | {"decoder_sparse_step", "mlp_only_layers"},
        QWENS,
        DEFAULT | YARN,
        written=("num_key_value_heads", "moe_intermediate_size", "num_experts", SHARED),
        filled=(*HEADS, "moe_intermediate_size", "num_experts", SHARED, "norm_topk_prob", "qkv_bias"),
    ),
    "GPT2LMHeadModel": Family(
        {"n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "layer_norm_epsilon", "tie_word_embeddings"}
        | {"resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn"}  # dropout, and the order of sums
        | {"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"},
        {"activation_function": ("gelu_new",), "scale_attn_weights": (True,)}
        | {"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        {},
        {},
        {"n_ctx": "n_positions"},
        filled=("activation_function", "layer_norm_epsilon"),
    ),
    "GptOssForCausalLM": Family(
        PLAIN | {"num_local_experts", "num_experts", "num_experts_per_tok", "attention_bias", "sliding_window"},
        SILU | {"swiglu_limit": (7,), "initial_context_length": (4096,)},
        GPT_OSS_YARN,
        {"norm_topk_prob": True},
        {"experts_per_token": "num_experts_per_tok"},
        ("num_local_experts", *HEADS, "sliding_window"),
        ("num_local_experts", *HEADS),
        ("sliding_attention", "full_attention"),
    ),
    "OlmoeForCausalLM": Family(
        SIZES | ROTARY | {"rms_norm_eps", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok"},
        SILU
        | {"norm_topk_prob": (False,), "attention_bias": (False,), "clip_qkv": (None,)}
        | {"tie_word_embeddings": (False,), "scoring_func": ("softmax",)},
        DEFAULT | YARN,
        {},
        {"num_key_value_heads": "num_attention_heads"},
        ("num_experts",),
        ("num_experts", "head_dim"),
    ),
}


def unread(config: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Lines for keys that would not reach Megatron's model, of a family that is converted here.

    `ignored` are keys that the user answers for.
    """
    family = FAMILIES[_name(config)]
    found = [*_unread(config, family), *_rotation(config, family), *_routing(config, family)]
    return [f"{key} is {text}" for key, text in found if key.partition(".")[0] not in ignored and key not in ignored]


def _unread(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    for key in family.written:
        if key not in config:
            yield key, "absent, and transformers has another default than Megatron-Bridge; write it down"
    for key in family.filled:
        if key in config and config[key] is None:
            yield key, f"null, which cannot be converted of {_name(config)}; write a value down"
    builds = f"and Megatron-Bridge builds {_name(config)} with"
    only = {**OF_ALL, **family.only}
    for key, value in config.items():
        if key in family.same and value is not None:
            if value != config.get(family.same[key], value):
                yield key, f"{_show(value)}, {builds} that of {family.same[key]} alone"
        elif key in only:
            if value is not None and not _among(value, only[key]):
                yield key, f"{_show(value)}, {builds} {_show(only[key][0])} alone"
        elif key in OF_LAYERS and family.turns:
            if value and value != [family.turns[n % len(family.turns)] for n in range(_layers(config))]:
                yield key, f"{_show(value)}, {builds} {' and '.join(family.turns)} by turns alone"
        elif key in OF_LAYERS:
            if value and not (isinstance(value, list) and all(kind == OF_LAYERS[key] for kind in value)):
                yield key, f"{_show(value)}, {builds} {OF_LAYERS[key]} alone"
        elif key == FIRST_DENSE:
            if value and value != ["dense", *["sparse"] * (_layers(config) - 1)]:
                yield key, f"{_show(value)}, {builds} experts in all layers but the first alone"
        elif key in WINDOWS and "use_sliding_window" in only:
            continue
        elif not (key in family.read or key in LEFT or key.startswith(PREFIXES) or _says_nothing(value)):
            yield key, f"{_show(value)}, which Megatron-Bridge does not read of {_name(config)}"


def _rotation(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Check rotary scaling. transformers takes rope_scaling, the older name, where both are given."""
    if not family.rotations:  # learned positions, of which no key says anything
        return
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        yield key, f"{_show(given)}, which is no section of keys"
        return
    kind = given.get("rope_type", given.get("type", "default"))
    rotation = family.rotations.get(kind) if isinstance(kind, str) else None
    if rotation is None:
        reads = f"it reads {', '.join(family.rotations)}"
        yield f"{key}.rope_type", f"{_show(kind)}, which Megatron-Bridge does not read of {_name(config)}; {reads}"
        return
    if given.get("type", kind) not in (kind, None):
        yield f"{key}.type", f"{_show(given['type'])}, which Megatron-Bridge reads, and rope_type is {_show(kind)}"
    factor = "partial_rotary_factor"
    share = config[factor] if config.get(factor) is not None else family.defaults.get(factor, 1)
    if "rotary_dim" in family.read and config.get("rotary_dim") and config.get("head_dim"):
        share = config["rotary_dim"] / config["head_dim"]
    right = {"rope_type": ANY, "type": ANY, "rope_theta": ANY, factor: (share,)} | dict(rotation.read)
    for name, value in given.items():
        if value is None or right.get(name) is ANY:
            continue
        if name not in right and name not in rotation.lost and _says_nothing(value):
            continue
        if name not in right:
            yield f"{key}.{name}", f"{_show(value)}, which Megatron-Bridge does not read of {_name(config)}"
        elif not _among(value, right[name]):
            yield f"{key}.{name}", f"{_show(value)}, and Megatron computes with {_show(right[name][0])} alone"
    for name in rotation.needs:
        if given.get(name) is None:
            yield f"{key}.{name}", "absent, and Megatron has another default than transformers; write it down"
    if "mscale" in rotation.read and bool(given.get("mscale")) != bool(given.get("mscale_all_dim")):
        yield f"{key}.mscale", "given without mscale_all_dim or the other way round: Megatron would scale otherwise"


def _routing(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Check the routing of tokens to experts.

    With one expert a token, Megatron leaves its weight as it is; with several it makes the sum of the weights 1.
    transformers ranks groups by the sum of their best 2 experts, Megatron by that of the best top_k / topk_group.
    """
    of = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    each = of.get("num_experts_per_tok", 0)
    if each == 1 and True in (of.get("norm_topk_prob"), "n_group" in family.defaults):
        yield "num_experts_per_tok", "1, and Megatron makes the weights of a token's experts sum to 1 only of several"
    groups, kept = of.get("n_group", 0), of.get("topk_group", 0)
    sizes = "n_group" in family.defaults and all(type(size) is int and size > 0 for size in (groups, kept, each))
    if sizes and groups != kept and each // kept != 2:
        text = f"the {groups} groups by their best {each // kept} experts, and not by 2"
        yield "topk_group", f"{kept}, of which Megatron would rank {text}"


def _layers(config: Mapping[str, Any]) -> int:
    """Number of layers; 0 if the key holds none, which conf/model_facts.py reports."""
    found = config.get("num_hidden_layers")
    return found if type(found) is int else 0


def _says_nothing(value: Any) -> bool:
    return isinstance(value, str) or value in (None, False, 0, [], {}) or (type(value) is not bool and value == 1)


def _among(value: Any, right: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in right)


def _name(config: Mapping[str, Any]) -> str:
    return config["architectures"][0]


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
