"""Sizes of a config.json by Llama's names, and by the names that GLM-4.5+, DeepSeek-V3, Qwen-MoE and Mixtral add.

    Keys(config).size("hidden_size", least=1)      the value, or ValueError: hidden_size is null, ...
    llama_facts(keys, qk_norm=True)                facts by these names; arguments: facts without a key in config.json

Not covered: biases on Llama's o_proj alone.
"""

from dataclasses import dataclass, replace
from typing import Any

from conf.families.parts.sizes import DeltaNet, ModelFacts
from contract.json_object import show

LIMIT = 2**24  # larger than any size of any model
# Smaller limits, because the planner visits each layer.
LIMITS = {"num_hidden_layers": 1024, "n_layer": 1024, "num_nextn_predict_layers": 64}
LIMITS |= {"mtp_num_hidden_layers": 64}
LIMITS |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok"), 2**14)
LIMITS |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_shared_experts"), 2**14)

DELTA_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Keys:
    """A config.json, and a reader of its sizes."""

    config: dict[str, Any]

    def size(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the value of the first of these keys in config.json. Raise ValueError if it is not a size."""
        present = {name: self.config[name] for name in names if self.config.get(name) is not None}
        if not present and default is not None:
            return default
        name, value = next(iter(present.items()), (" or ".join(names), None))
        most = LIMITS.get(name, LIMIT)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"config.json: {name} is {show(value)}, which is not a size from {least} to {most}")
        return value

    def head_dim(self, whole: str = "hidden_size", parts: str = "num_attention_heads") -> int:
        hidden, heads = self.size(whole, least=1), self.size(parts, least=1)
        if hidden % heads:
            undivided = f"{parts} is {heads}, which does not divide {whole}, {hidden}"
            raise ValueError(f"config.json: {undivided}, and head_dim is missing")
        return hidden // heads

    def layers(self, name: str, count: int) -> tuple[int, ...]:
        """Return the numbers of the layers that a key lists."""
        listed = self.config.get(name) or []
        if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < count for layer in listed):
            raise ValueError(f"config.json: {name} is {listed!r}, which is not a list of layers from 0 to {count - 1}")
        return tuple(sorted(set(listed)))


def llama_facts(keys: Keys, **unsaid: Any) -> ModelFacts:
    """Return facts by Llama's names. `unsaid` are facts of the family that have no key in config.json."""
    config, size = keys.config, keys.size
    layers, hidden = size("num_hidden_layers", least=1), size("hidden_size", least=1)
    heads = size("num_attention_heads", least=1)
    experts = size("n_routed_experts", "num_experts", "num_local_experts", default=0)
    dense_layers = size("first_k_dense_replace", default=0) if experts else layers
    moe_step = size("decoder_sparse_step", "moe_layer_freq", default=1, least=1) if experts else 1
    dense_too = keys.layers("mlp_only_layers", layers) if experts else ()
    expert_ffn = size("moe_intermediate_size", "intermediate_size", least=1) if experts else 0
    shared = size("n_shared_experts", default=0) * expert_ffn
    latent = config.get("kv_lora_rank") is not None
    facts = ModelFacts(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else size("num_key_value_heads", default=heads, least=1),
        head_dim=0 if latent else size("head_dim", default=0) or keys.head_dim(),
        vocab=size("vocab_size", least=1),
        ffn=size("intermediate_size", least=1) if dense_layers or dense_too or moe_step > 1 else 0,
        experts=experts,
        top_k=size("num_experts_per_tok", least=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=size("shared_expert_intermediate_size", default=shared) if experts else 0,
        dense_layers=dense_layers,
        moe_step=moe_step,
        dense_too=dense_too,
        mtp_layers=size("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0),
        q_rank=size("q_lora_rank", default=0) if latent else 0,
        kv_rank=size("kv_lora_rank", least=1) if latent else 0,
        qk_nope=size("qk_nope_head_dim", least=1) if latent else 0,
        qk_rope=size("qk_rope_head_dim", least=1) if latent else 0,
        v_head=size("v_head_dim", least=1) if latent else 0,
        angles=_angles(config) if latent else 0,
        qk_norm=latent or bool(config.get("use_qk_norm")),
        attention_bias=bool(config.get("attention_bias")),
        linear_bias=bool(config.get("mlp_bias")),
        tied=bool(config.get("tie_word_embeddings")),
    )
    if unsaid.get("windows"):
        size("sliding_window", least=1)
    if not experts:
        unsaid.pop("expert_bias", None)
    return replace(facts, **unsaid)


def delta_facts(keys: Keys, **unsaid: Any) -> ModelFacts:
    """Facts of a model with gated delta nets and gated attention, by the names of Qwen3-Next and Qwen3.5."""
    facts = llama_facts(keys, qk_norm=True, output_gate=True, **unsaid)
    step = keys.size("full_attention_interval", default=4, least=1)
    turns = ["full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in range(facts.layers)]
    kinds = keys.config.get("layer_types") or turns
    if not isinstance(kinds, list) or len(kinds) != facts.layers or not {*map(str, kinds)} <= {*DELTA_KINDS}:
        raise ValueError(f"config.json: layer_types is not a list of {facts.layers} of {' and '.join(DELTA_KINDS)}")
    net = DeltaNet(
        key_heads=keys.size("linear_num_key_heads", least=1),
        value_heads=keys.size("linear_num_value_heads", least=1),
        key=keys.size("linear_key_head_dim", least=1),
        value=keys.size("linear_value_head_dim", least=1),
        window=keys.size("linear_conv_kernel_dim", least=1),
    )
    if net.value_heads % net.key_heads:
        raise ValueError(
            f"config.json: linear_num_key_heads is {net.key_heads}, which does not divide linear_num_value_heads, "
            f"{net.value_heads}"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if facts.mtp_layers and (facts.mtp_layers > 1 or kinds[-1] == "linear_attention"):
        key = "mtp_num_hidden_layers" if keys.config.get("mtp_num_hidden_layers") else "num_nextn_predict_layers"
        text = "but only 1 is supported, after a layer with full_attention; with 0 it is copied"
        raise ValueError(f"config.json: {key} is {facts.mtp_layers} after a layer with {kinds[-1]}, {text}")
    return replace(facts, delta=net, delta_layers=layers)


def _angles(config: dict[str, Any]) -> int:
    """Return the number of rotations of latent attention. Bridge reads YaRN's; core has a default for other kinds."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or "yarn" not in (scaling.get("type"), scaling.get("rope_type")):
        return 4096
    rows = scaling.get("original_max_position_embeddings", 4096)
    if type(rows) is not int or rows < 1:
        raise ValueError(f"config.json: original_max_position_embeddings is {rows!r}, which is not a size from 1")
    return rows


def check(facts: ModelFacts) -> None:
    """Raise ValueError if values contradict each other."""
    text = ""
    if facts.heads % facts.kv_heads:
        text = f"num_key_value_heads is {facts.kv_heads}, which does not divide num_attention_heads, {facts.heads}"
    elif facts.experts and facts.top_k > facts.experts:
        text = f"num_experts_per_tok is {facts.top_k}, but there are {facts.experts} experts"
    elif facts.dense_layers > facts.layers:
        text = f"first_k_dense_replace is {facts.dense_layers}, but there are {facts.layers} layers"
    elif facts.mtp_layers > facts.layers:
        text = f"num_nextn_predict_layers is {facts.mtp_layers}, but there are {facts.layers} layers"
    if text:
        raise ValueError(f"config.json: {text}")


def check_rotations(config: dict[str, Any], facts: ModelFacts) -> None:
    """Raise ValueError if rotary embeddings rotate an odd number of values. Training would fail: they rotate pairs."""
    if facts.positions or not facts.rotary:
        return
    key, width = ("qk_rope_head_dim", facts.qk_rope) if facts.kv_rank else ("head_dim", facts.head_dim)
    rotary = config.get("rope_parameters")
    of_rotary = rotary.get("partial_rotary_factor") if isinstance(rotary, dict) else None
    share = of_rotary or config.get("partial_rotary_factor") or 1
    turned = int(width * share) if isinstance(share, int | float) else width
    if turned % 2:
        part = f", of which partial_rotary_factor {share} rotates {turned} numbers" if turned != width else ""
        raise ValueError(f"config.json: {key} is {width}{part}, but rotary embeddings rotate pairs")
