"""The description of a model family. Each file of conf/families/ has one, as FAMILY.

A config.json can ask for more than Megatron's model computes: Megatron-Bridge copies the keys that it knows, assumes
the values of some others and ignores the rest. The conversion of the weights does not notice. So each key is checked:

    read        Megatron-Bridge reads the key, so any value is allowed
    assumed     Megatron-Bridge does not read the key but assumes one of these values; model.ignore_config allows others
    fixed       like assumed, for keys that sizes depend on: another value is always refused
    repeats     keys that transformers writes, and the key whose value they must repeat
    stated      keys that must be present, as the defaults of transformers and Megatron-Bridge differ
    renamed     stated keys, and the name by which transformers 5 reads and writes each
    not_null    keys that cannot be null: transformers refuses null, or Megatron-Bridge ignores it
    rotations   kinds of rotary embeddings, and the keys of each
    any other   allowed if its value has no meaning (null, false, 0, 1, empty), or is text

conf/rules/function.py has the keys that every family shares.
"""

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.families.parts import tensors
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import ModelFacts

Config = dict[str, Any]
ANY: Any = object()


@dataclass(frozen=True)
class Rotation:
    """A kind of rotary embedding."""

    read: Mapping[str, Any] = field(default_factory=dict)  # by key: ANY, or the only allowed values
    needs: tuple[str, ...] = ()  # keys that must be present, as defaults differ
    lost: tuple[str, ...] = ()  # keys that are not read, whatever their value


@dataclass(frozen=True)
class Balance:
    """Balancing of the experts of a family in Megatron-Bridge 0.6."""

    key: str = ""  # key of config.json for the weight of the loss; Bridge's default is above 0
    always: bool = False  # the weight of the loss is above 0 whatever config.json says
    moves_bias: bool = False  # training adjusts a bias of routing scores to the load of the experts


@dataclass(frozen=True)
class Serving:
    """Limits of vLLM 0.26 for a family. conf/rules/serving.py has the limits that depend on sizes."""

    on_cpu: str = ""  # reason why vLLM cannot serve it on a CPU; empty if it can
    expert_adapters: str = ""  # reason why adapters of experts cannot be served next to the base; empty if they can
    packed: bool = False  # whether it serves the codes of a packed base (tests/trainer/test_packed_for_vllm.py)


@dataclass(frozen=True)
class Family:
    architecture: str  # the class of transformers: the first entry of config.json's architectures
    model_type: str
    read: Collection[str]
    assumed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    repeats: Mapping[str, str] = field(default_factory=dict)
    stated: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    not_null: tuple[str, ...] = ()
    rotations: Mapping[str, Rotation] = field(default_factory=dict)  # empty: positions are learned
    # Those of layers with windows, if rope_parameters has an object for each kind of layer; empty: it has one for all.
    local_rotations: Mapping[str, Rotation] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of transformers that rules need
    # Further changes of a config.json that is cut to this number of layers.
    cut: Callable[[Config, int], Config] = lambda config, layers: {}
    layer_turns: tuple[str, ...] = ()  # kinds of layers that alternate; empty: all are alike

    facts: Callable[[Keys], ModelFacts] = llama_facts
    layer: Callable[[ModelFacts, str], tensors.Tensors] = tensors.layer  # tensors of a layer of this kind
    ends: Callable[[ModelFacts], tuple[tensors.Tensors, tensors.Tensors]] = tensors.ends
    roots: tuple[str, ...] = ("model.",)  # names of a release begin with one of these, by default with the first
    embedding: str = "embed_tokens.weight"  # name without the root
    as_saved: Mapping[str, str] = field(default_factory=dict)  # by a release's name: the name that transformers writes
    layers_in: str = "layers"  # module that contains the layers, without the root
    names: Mapping[str, str] = field(default_factory=dict)  # the family's names for Llama's and DeepSeek-V3's keys
    ahead: str = ""  # beginning of the names of the MTP layer; empty: it is numbered after the ordinary layers

    read_as: str = ""  # model_type of transformers' text model, if it differs
    by_name: bool = False  # Megatron-Bridge registers it by class name, so releases may have code for their model
    balance: Balance | None = None  # None: no experts, or no router losses
    serving: Serving | None = Serving()  # None: vLLM cannot serve it
    gguf: str = ""  # llama.cpp's architecture (tests/trainer/test_gguf.py); empty: its files were not compared
    megatron: str = ""  # torch part of a family from outside the repository: import path, or a Python file
    narrow: tuple[str, ...] = ()  # name endings of weights drawn with a deviation divided by sqrt(2 * layers)
    copied: tuple[str, ...] = ()  # beginnings of names of released tensors that are not trained; an export copies them
    constants: Mapping[str, float] = field(default_factory=dict)  # by name ending: value of weights that are not drawn
    zero_padding: bool = True  # the embedding of pad_token_id starts at 0
    releases: Mapping[str, float] = field(default_factory=dict)  # offered for unsupported models: 1e9 parameters
    # config.json of tiny models, by the suffix of their name; empty: NAME.json and NAME-SUFFIX.json next to NAME.py
    tiny: Mapping[str, Config] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the family's name for one of Llama's keys."""
        return self.names.get(name, name)

    def constant(self, name: str) -> float | None:
        """Return the initial value of a weight that is not drawn, by its name; None for other weights."""
        return next((value for ending, value in self.constants.items() if name.endswith(ending)), None)

    def unused(self, facts: ModelFacts, root: str) -> tuple[str, ...]:
        """Return the beginnings of names of keys and values that layers have, but take from earlier layers instead."""
        layers = range(facts.layers - facts.borrowing, facts.layers)
        return tuple(f"{root}{self.layers_in}.{layer}.self_attn.{part}_" for layer in layers for part in "kv")

    def root(self, names: Container[str]) -> str:
        """Return the beginning of the names of a release."""
        return next((root for root in self.roots if root + self.embedding in names), self.roots[0])

    def present(self, name: str, names: Container[str]) -> str:
        """Return the name that a tensor of a release has among these names."""
        saved = self.as_saved.get(name, name)
        return saved if saved in names else name

    def embedded(self, names: Container[str]) -> str:
        """Return the name of the embedding."""
        return self.present(self.root(names) + self.embedding, names)

    def stacks(self, names: Collection[str], kind: str = "") -> bool:
        """Return whether a release has one tensor for all experts of a layer. MTP layers can differ from the others."""
        layers = self.ahead if kind == "mtp" and self.ahead else f"{self.root(names)}{self.layers_in}."
        return any(name.startswith(layers) and name.endswith(tensors.STACK) for name in names)

    def tensors(self, facts: ModelFacts, names: Collection[str] = ()) -> dict[str, tensors.Tensor]:
        """Return every tensor by its released name. Multi-token-prediction layers follow the ordinary layers.

        `names` are those of a release, which may have another root, or one tensor for all experts of a layer.
        """
        root = self.root(names)
        stacks = {kind: self.stacks(names, kind) for kind in (*facts.kinds, "mtp")}
        first, last = self.ends(facts)
        every = dict(tensors.named(first, root))
        for number in range(facts.layers + facts.mtp_layers):
            kind = facts.kinds[number] if number < facts.layers else "mtp"
            of_layer = self.layer(facts, kind)
            prefix = self.ahead if kind == "mtp" and self.ahead else f"{root}{self.layers_in}.{number}."
            for name, tensor in tensors.named(tensors.stacked(of_layer) if stacks[kind] else of_layer):
                every[prefix + name] = tensor
        return {self.present(name, names): tensor for name, tensor in [*every.items(), *tensors.named(last, root)]}


# Sets of keys that several families share.
SIZES = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
SIZES |= {"vocab_size"}
EXPERTS = {"num_experts_per_tok", "moe_intermediate_size"}
SIGMOID_EXPERTS = EXPERTS | {"n_routed_experts", "num_local_experts", "n_shared_experts", "first_k_dense_replace"}
SIGMOID_EXPERTS |= {"routed_scaling_factor", "n_group", "topk_group", "num_nextn_predict_layers", "moe_layer_freq"}
LATENT = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
ROTARY = {"rope_theta", "rope_parameters", "rope_scaling"}
PLAIN = SIZES | ROTARY | {"rms_norm_eps", "head_dim", "tie_word_embeddings"}
LATENT_EXPERTS = SIZES | ROTARY | SIGMOID_EXPERTS | LATENT | {"rms_norm_eps", "tie_word_embeddings", "attention_bias"}
SILU = {"hidden_act": ("silu",)}  # on a GPU Megatron's fused gelu is another function
QWENS = SILU | {"use_sliding_window": (False,)}
SIGMOID = SILU | {"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
# Sizes that must be present, as the planner and transformers assume different defaults, or transformers needs them.
HEADS = ("num_key_value_heads", "head_dim")
SIGMOID_SIZES = ("first_k_dense_replace", "moe_intermediate_size")
COUNTS = ("n_routed_experts", "n_shared_experts")
GROUPED = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
RANKS = ("q_lora_rank", "kv_lora_rank")  # without q_lora_rank the query is one matrix, and the conversion fails
DEFAULT = {"default": Rotation()}
YARNS = {"factor": ANY, "original_max_position_embeddings": ANY, "beta_fast": ANY, "beta_slow": ANY}
YARNS |= {"mscale": ANY, "mscale_all_dim": ANY}
REQUIRED = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
LOST = ("attention_factor",)  # without it cosines and sines are scaled by a function of factor
YARN = {"yarn": Rotation(YARNS | {"truncate": ANY}, REQUIRED, LOST)}
LATENT_YARN = {"yarn": Rotation(YARNS | {"truncate": (True,)}, ("factor",), LOST)}
