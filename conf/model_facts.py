"""Sizes and kinds of layers of a model, read from its config.json: the facts that the arithmetic needs.

    facts_from_hf(config)    of a config.json that was read; ValueError of one line for what is no model
    known(name)              of conf/models/NAME.json: {"source": where it is from, "config": its config.json, trimmed}

Counts are exact for the families in CONVERTED. Others work by the names that Llama, GLM-4.5+, DeepSeek-V3, Qwen-MoE and
Mixtral use. Not covered: biases on Llama's o_proj alone, other kinds of layers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from conf.model_files import config_json, quantization
from contract.json_object import show

MODELS = Path(__file__).parent / "models"
# Those that are converted and trained here, with their model_type. Megatron-Bridge knows more, which nobody has tried.
CONVERTED = {
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt_oss",
}
# What transformers and vLLM read as another model_type, too: Kimi-K2 is a DeepSeek-V3.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Said by no key: Qwen2 has biases on q, k and v, Qwen3 norms on q and k. Qwen2-MoE has biases unless qkv_bias is false.
BIASED = ("Qwen2ForCausalLM",)
NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
OVER_HEADS = ("OlmoeForCausalLM", "MiniMaxM2ForCausalLM")  # of queries, and of keys, over all heads together
# A bias is added to the scores by which experts are chosen; the releases name it e_score_correction_bias.
EXPERT_BIASED = ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "MiniMaxM2ForCausalLM")
GPT2 = "GPT2LMHeadModel"
QWEN2_MOE = "Qwen2MoeForCausalLM"
GPT_OSS = "GptOssForCausalLM"
MISTRAL = "MistralForCausalLM"
# What Megatron-Bridge 0.6 takes for granted of a family, whatever its config.json says.
GRANTED: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"n_shared_experts": 1, "tie_word_embeddings": False},
    "Glm4MoeLiteForCausalLM": {"tie_word_embeddings": False, "attention_bias": False},
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 1, "tie_word_embeddings": False, "attention_bias": False},
    "Qwen3MoeForCausalLM": {"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    GPT_OSS: {"tie_word_embeddings": False, "attention_bias": True},
}
LIMIT = 2**24  # no size of any model is larger
# Nor any of these: of layers the planner looks at each.
LIMITS = {"num_hidden_layers": 1024, "n_layer": 1024, "num_nextn_predict_layers": 64}
LIMITS |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok"), 2**14)
LIMITS |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_shared_experts"), 2**14)


@dataclass(frozen=True)
class ModelFacts:
    layers: int  # without multi-token-prediction layers, which all lie on the last stage
    hidden: int
    heads: int
    kv_heads: int  # one per head with latent attention
    head_dim: int  # 0 with latent attention
    vocab: int
    ffn: int  # inner width of a dense layer; 0 = there is none
    experts: int = 0  # routed experts of an MoE layer; 0 = a dense model
    top_k: int = 0  # experts that a token takes
    expert_ffn: int = 0
    shared_ffn: int = 0  # inner width of all shared experts of a layer together
    dense_layers: int = 0  # the first that are dense whatever moe_step says; all layers of a dense model
    moe_step: int = 1  # n, where every n-th layer behind them has experts
    dense_too: tuple[int, ...] = ()  # more layers that are dense, counted from 0
    mtp_layers: int = 0
    # latent attention (DeepSeek-V3); kv_rank 0 = there is none, q_rank 0 = the query is no product of two
    q_rank: int = 0
    kv_rank: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    angles: int = 0  # rows of the table of rotations that Megatron makes for latent attention
    qk_norm: bool = False  # with latent attention: on the low-rank query and key-value
    norm_over_heads: bool = False  # these norms are as wide as all heads, not as one
    gated: bool = True  # three matrices in an MLP, not two
    attention_bias: bool = False  # on q, k and v
    linear_bias: bool = False  # on every linear layer, routers too
    sinks: bool = False  # a score of each head, beside those of keys
    windows: bool = False  # of some layers, or all: a token attends to that many before it
    layernorm: bool = False  # norms have a bias as well as a weight
    expert_bias: bool = False  # added to routing scores; moved by the trainer, not by gradients: no parameter
    shared_gate: bool = False  # a token weighs the shared experts
    tied: bool = False  # the output layer is the embedding
    positions: int = 0  # learned; 0 = rotary ones, which hold no parameters
    vocab_pad: int = 0  # the vocabulary is padded to a multiple of this * tp; 0 = it is not
    architecture: str = ""
    packed: float = 0.0  # bytes that the release has of a quantised weight, with its share of a scale; 0 = it has none
    packed_experts: bool = False  # of routed experts alone

    def kind(self, layer: int) -> str:
        """Kind of a layer: dense or moe."""
        if layer < self.dense_layers or layer in self.dense_too or not self.experts:
            return "dense"
        return "moe" if (layer + 1) % self.moe_step == 0 else "dense"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.kind(layer) for layer in range(self.layers))

    def padded_vocab(self, tp: int) -> int:
        multiple = self.vocab_pad * tp or 1
        return -(-self.vocab // multiple) * multiple


@cache
def known(name: str) -> ModelFacts:
    path = MODELS / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in MODELS.glob("*.json")))
        raise ValueError(f"{name}: no such model in conf/models; there are {names}")
    return facts_from_hf(json.loads(path.read_text())["config"])


def facts_from_hf(config: dict[str, Any]) -> ModelFacts:
    def size(*names: str, default: int | None = None, least: int = 0) -> int:
        """Value of the first given name of those that a size goes by."""
        given = {name: config[name] for name in names if config.get(name) is not None}
        if not given and default is not None:
            return default
        name, value = next(iter(given.items()), (" or ".join(names), None))
        most = LIMITS.get(name, LIMIT)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"config.json: {name} is {show(value)}, which is no size from {least} to {most}")
        return value

    config_json.check(config)
    architecture = config_json.architecture(config)
    for key, value in GRANTED.get(architecture, {}).items():
        if config.get(key, value) not in (value, None):
            raise ValueError(
                f"config.json: {key} is {config[key]!r}, and Megatron-Bridge builds {architecture} with {value!r} alone"
            )
    facts = _gpt2(config, size) if architecture == GPT2 else _by_llamas_names(config, architecture, size)
    _check(facts)
    _check_rotations(config, facts)
    return replace(facts, **_packed(config))


def _packed(config: dict[str, Any]) -> dict[str, Any]:
    try:
        scheme = quantization.scheme(config)
    except ValueError:  # conf/rules/conversion.py says so
        return {}
    if scheme is None:
        return {}
    scale = {"mxfp4": 1, "nvfp4": 1, "fp8": 4}.get(scheme.kind, 2) / (scheme.block[0] * scheme.block[1])
    return {"packed": scheme.bits / 8 + scale, "packed_experts": any("attn" in name for name in scheme.unquantised)}


def _gpt2(config: dict[str, Any], size: Callable[..., int]) -> ModelFacts:
    """Facts of a GPT-2, whose vocabulary nothing divides: it is padded."""
    hidden, heads, layers = (size(name, least=1) for name in ("n_embd", "n_head", "n_layer"))
    return ModelFacts(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim("n_embd", hidden, "n_head", heads),
        vocab=size("vocab_size", least=1),
        ffn=size("n_inner", default=4 * hidden, least=1),
        dense_layers=layers,
        gated=False,
        attention_bias=True,
        linear_bias=True,
        layernorm=True,
        tied=config.get("tie_word_embeddings") is not False,
        positions=size("n_positions", least=1),
        vocab_pad=128,
        architecture=GPT2,
    )


def _by_llamas_names(config: dict[str, Any], architecture: str, size: Callable[..., int]) -> ModelFacts:
    layers, hidden = size("num_hidden_layers", least=1), size("hidden_size", least=1)
    heads = size("num_attention_heads", least=1)
    experts = size("n_routed_experts", "num_experts", "num_local_experts", default=0)
    dense_layers = size("first_k_dense_replace", default=0) if experts else layers
    moe_step = size("decoder_sparse_step", "moe_layer_freq", default=1, least=1) if experts else 1
    dense_too = _layers_in(config, "mlp_only_layers", layers) if experts else ()
    expert_ffn = size("moe_intermediate_size", "intermediate_size", least=1) if experts else 0
    shared = size("n_shared_experts", default=0) * expert_ffn
    latent = config.get("kv_lora_rank") is not None
    windows = architecture == GPT_OSS or (architecture == MISTRAL and config.get("sliding_window") is not None)
    if windows:
        size("sliding_window", least=1)
    return ModelFacts(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else size("num_key_value_heads", default=heads, least=1),
        head_dim=0
        if latent
        else size("head_dim", default=0) or _head_dim("hidden_size", hidden, "num_attention_heads", heads),
        vocab=size("vocab_size", least=1),
        ffn=size("intermediate_size", least=1) if dense_layers or dense_too or moe_step > 1 else 0,
        experts=experts,
        top_k=size("num_experts_per_tok", least=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=size("shared_expert_intermediate_size", default=shared) if experts else 0,
        dense_layers=dense_layers,
        moe_step=moe_step,
        dense_too=dense_too,
        mtp_layers=size("num_nextn_predict_layers", default=0),
        q_rank=size("q_lora_rank", default=0) if latent else 0,
        kv_rank=size("kv_lora_rank", least=1) if latent else 0,
        qk_nope=size("qk_nope_head_dim", least=1) if latent else 0,
        qk_rope=size("qk_rope_head_dim", least=1) if latent else 0,
        v_head=size("v_head_dim", least=1) if latent else 0,
        angles=_angles(config) if latent else 0,
        qk_norm=latent or bool(config.get("use_qk_norm")) or architecture in (*NORMED, *OVER_HEADS),
        norm_over_heads=architecture in OVER_HEADS,
        attention_bias=_has_attention_bias(config, architecture),
        linear_bias=bool(config.get("mlp_bias")) or architecture == GPT_OSS,
        sinks=architecture == GPT_OSS,
        windows=windows,
        expert_bias=bool(experts) and architecture in EXPERT_BIASED,
        shared_gate=architecture == QWEN2_MOE,
        tied=bool(config.get("tie_word_embeddings")),
        architecture=architecture,
    )


def _has_attention_bias(config: dict[str, Any], architecture: str) -> bool:
    if architecture == QWEN2_MOE:
        return config.get("qkv_bias", True) is not False
    return bool(config.get("attention_bias")) or architecture in BIASED


def _head_dim(whole: str, hidden: int, parts: str, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"config.json: {parts} is {heads}, which does not divide {whole}, {hidden}, and no head_dim is given"
        )
    return hidden // heads


def _angles(config: dict[str, Any]) -> int:
    """Number of rotations of latent attention. Bridge takes YaRN's; core has a default for all other kinds."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or "yarn" not in (scaling.get("type"), scaling.get("rope_type")):
        return 4096
    rows = scaling.get("original_max_position_embeddings", 4096)
    if type(rows) is not int or rows < 1:
        raise ValueError(f"config.json: original_max_position_embeddings is {rows!r}, which is no size from 1")
    return rows


def _layers_in(config: dict[str, Any], name: str, layers: int) -> tuple[int, ...]:
    found = config.get(name) or []
    if not isinstance(found, list) or not all(type(layer) is int and 0 <= layer < layers for layer in found):
        raise ValueError(f"config.json: {name} is {found!r}, which is no list of layers from 0 to {layers - 1}")
    return tuple(sorted(set(found)))


def _check(facts: ModelFacts) -> None:
    """Raise ValueError for values that contradict one another, so that no single key is wrong."""
    text = ""
    if facts.heads % facts.kv_heads:
        text = f"num_key_value_heads is {facts.kv_heads}, which does not divide num_attention_heads, {facts.heads}"
    elif facts.experts and facts.top_k > facts.experts:
        text = f"num_experts_per_tok is {facts.top_k}, of {facts.experts} experts"
    elif facts.dense_layers > facts.layers:
        text = f"first_k_dense_replace is {facts.dense_layers}, of {facts.layers} layers"
    elif facts.mtp_layers > facts.layers:
        text = f"num_nextn_predict_layers is {facts.mtp_layers}, beside {facts.layers} layers"
    elif facts.architecture == "DeepseekV3ForCausalLM" and not facts.shared_ffn:
        text = "n_shared_experts is 0, and Megatron-Bridge builds this family with one or more"
    if text:
        raise ValueError(f"config.json: {text}")


def _check_rotations(config: dict[str, Any], facts: ModelFacts) -> None:
    """Raise ValueError where what rotary embeddings turn of a head is no pairs: training would end with an error."""
    if facts.positions:
        return
    key, width = ("qk_rope_head_dim", facts.qk_rope) if facts.kv_rank else ("head_dim", facts.head_dim)
    given = config.get("rope_parameters")
    share = config.get("partial_rotary_factor") or (
        given.get("partial_rotary_factor") if isinstance(given, dict) else 1
    )
    turned = int(width * share) if isinstance(share, int | float) else width
    if turned % 2:
        part = f", of which partial_rotary_factor {share} turns {turned} numbers" if turned != width else ""
        raise ValueError(f"config.json: {key} is {width}{part}, and rotary embeddings turn pairs")
