"""Gemma 4, the text model: dense, or with a dense MLP and experts next to each other in each layer.

Layers without a window have wider heads. A part of each of these heads is rotated, and their keys can be their values.
Norms follow attention, each MLP and their sum. The output of a layer is scaled by a number that is not trained. In
small models the last layers have the keys and values of earlier layers, and each layer has a second embedding.

Scores of attention are not scaled. Drawn norms of keys are therefore small, or attention would take one token only.
"""

from dataclasses import replace

from conf.families.gemma3_text import GLOBAL, LOCAL
from conf.families.parts import tensors
from conf.families.parts.family import ANY, DEFAULT, HEADS, PLAIN, Balance, Config, Family, Rotation
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import Heads, ModelFacts
from conf.families.parts.tensors import BUFFER, COPY, ROOT, Tensor, Tensors

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
OF_EXPERTS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
WIDE = {"global_head_dim", "num_global_key_value_heads"}
EXPERTS = {"num_experts", "top_k_experts", "moe_intermediate_size"}
DEFAULTS = {"tie_word_embeddings": True, "vocab_size_per_layer_input": 262144}
STATED = ("intermediate_size", "num_attention_heads", *HEADS, "vocab_size", "global_head_dim", "sliding_window")
BORROWING = "num_kv_shared_layers"
STATED += ("hidden_size_per_layer_input", BORROWING)
FLAGS = ("enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp")
SMALL = {BORROWING, *FLAGS, "hidden_size_per_layer_input", "vocab_size_per_layer_input"}


def facts(keys: Keys) -> ModelFacts:
    keys = Keys(DEFAULTS | keys.config)
    config, moe = keys.config, bool(keys.config.get("enable_moe_block"))
    renamed: Config = {"num_experts": None}
    if moe:
        renamed = {key: keys.size(key, least=1) for key in EXPERTS}
        renamed["num_experts_per_tok"] = renamed["top_k_experts"]
        renamed["shared_expert_intermediate_size"] = config.get("intermediate_size")
    found = llama_facts(Keys(config | renamed), qk_norm=True, windows=True)
    alike = bool(config.get("attention_k_eq_v"))
    wide = Heads(
        kv_heads=keys.size("num_global_key_value_heads", least=1) if alike else found.kv_heads,
        head_dim=keys.size("global_head_dim") or found.head_dim,
        values=not alike,
    )
    borrowing = keys.size(BORROWING, default=0)
    found = replace(
        found,
        wide=wide,
        wide_layers=_wide_layers(config, found.layers),
        borrowing=borrowing,
        borrowing_ffn=found.ffn * (2 if config.get("use_double_wide_mlp") else 1),
        per_layer=keys.size("hidden_size_per_layer_input"),
        capped=bool(config.get("final_logit_softcapping")),
    )
    own = {kind.replace("borrowing_", "") for kind in found.kinds if "borrowing" in kind}
    if not own <= {*found.kinds}:
        raise ValueError(f"config.json: {BORROWING} is {borrowing}, which leaves no layer with keys of one kind")
    if found.per_layer and config["vocab_size_per_layer_input"] != found.vocab:
        other = config["vocab_size_per_layer_input"]
        raise ValueError(f"config.json: vocab_size_per_layer_input is {other}, but vocab_size is {found.vocab}")
    return found


def cut(config: Config, layers: int) -> Config:
    own = config["num_hidden_layers"] - (config.get(BORROWING) or 0)
    return {BORROWING: max(0, layers - own)}


def ends(facts: ModelFacts) -> tuple[Tensors, Tensors]:
    first, last = tensors.ends(facts)
    width = facts.layers * facts.per_layer
    if width:
        first += [
            Tensor(f"{ROOT}embed_tokens_per_layer.weight", (facts.vocab, width), "embedding"),
            Tensor(f"{ROOT}per_layer_model_projection.weight", (width, facts.hidden), "per_layer"),
            Tensor(f"{ROOT}per_layer_projection_norm.weight", (facts.per_layer,), "per_layer"),
        ]
    return first, last


def _wide_layers(config: Config, count: int) -> tuple[int, ...]:
    """Return the layers without a window. transformers leaves the last layer without one, whatever config.json says."""
    turns = [GLOBAL if layer % 6 == 5 else LOCAL for layer in range(count)]
    kinds = config.get("layer_types") or turns
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {LOCAL, GLOBAL}:
        raise ValueError(f"config.json: layer_types is not a list of {count} of {LOCAL} and {GLOBAL}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == GLOBAL or layer == count - 1)


def layer(facts: ModelFacts, kind: str) -> Tensors:
    facts = facts.of(kind)
    norms = [Tensor(f"{name}_layernorm.weight", (facts.hidden,), "norms") for name in NORMS]
    found = [*norms, *tensors.attention(facts), Tensor("layer_scalar", (1,), BUFFER)]
    if not facts.keys:  # releases have keys and values that are not used, and vLLM needs their norm
        unused = tensors.attention(replace(facts, keys=True, values=True))
        found += [replace(tensor, kind=COPY, part="") for tensor in unused if tensor not in found]
    if facts.per_layer:
        found += [
            Tensor("per_layer_input_gate.weight", (facts.per_layer, facts.hidden), "per_layer"),
            Tensor("per_layer_projection.weight", (facts.hidden, facts.per_layer), "per_layer"),
            Tensor("post_per_layer_input_norm.weight", (facts.hidden,), "per_layer"),
        ]
    if not facts.routed(kind):
        return [*found, *tensors.gated_mlp("mlp", facts.hidden, facts.ffn)]
    return [*found, *tensors.gated_mlp("mlp", facts.hidden, facts.shared_ffn, "shared_experts"), *_experts(facts)]


def _experts(facts: ModelFacts) -> Tensors:
    hidden, width, count = facts.hidden, facts.expert_ffn, facts.experts
    router = {"proj.weight": (count, hidden), "scale": (hidden,), "per_expert_scale": (count,)}
    stacks = {"gate_up_proj": (count, 2 * width, hidden), "down_proj": (count, hidden, width)}
    layers = ("linear_fc1", "linear_fc2")
    return [
        *(Tensor(f"{name}.weight", (hidden,), "norms") for name in OF_EXPERTS),
        *(Tensor(f"router.{name}", shape, "router") for name, shape in router.items()),
        *(
            Tensor(f"experts.{name}", shape, "experts", part, experts=count, stacked=True)
            for (name, shape), part in zip(stacks.items(), layers, strict=True)
        ),
    ]


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    read=PLAIN | WIDE | EXPERTS | SMALL | {"sliding_window", "layer_types", "final_logit_softcapping"},
    assumed={
        "hidden_activation": ("gelu_pytorch_tanh", "silu"),  # on a GPU Megatron's fused gelu is the first
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision"),  # of the tokens of images
    },
    rotations={"proportional": Rotation({"partial_rotary_factor": ANY, "factor": ANY})},
    local_rotations=DEFAULT,
    stated=STATED,
    not_null=(*DEFAULTS, *STATED, *FLAGS, "hidden_activation"),
    defaults=DEFAULTS | {"norm_topk_prob": True},
    cut=cut,
    facts=facts,
    layer=layer,
    ends=ends,
    balance=Balance(),
    by_name=True,
    megatron="trainer.megatron.bridges.gemma4",
    constants={"k_norm.weight": 0.2, "norm.weight": 1.0, "layer_scalar": 1.0, "scale": 1.0},
)
