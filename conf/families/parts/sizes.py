"""Facts of a model that the planner, the rules and the list of tensors need: sizes, and kinds of layers."""

from dataclasses import dataclass, replace
from functools import cache, cached_property


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net, or of a Mamba-2 layer: its groups are key heads, its state is a key per value.

    Each key head serves value_heads / key_heads heads of values.
    """

    key_heads: int
    value_heads: int
    key: int  # width of a head's key and query
    value: int  # width of a head's value
    window: int  # tokens that its convolution mixes
    scan: bool = False  # Mamba-2's scan, which adds values to the state: the delta rule replaces them

    @property
    def keys(self) -> int:
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        return self.value_heads * self.value

    @property
    def noun(self) -> str:
        return "groups of Mamba layers" if self.scan else "key heads of gated delta nets"


@dataclass(frozen=True)
class Heads:
    """Heads of keys and values that differ from those of other layers. All layers have as many heads of queries."""

    kv_heads: int
    head_dim: int
    values: bool = True


@dataclass(frozen=True)
class ModelFacts:
    layers: int  # without multi-token-prediction layers, which are all on the last stage
    hidden: int
    heads: int
    kv_heads: int  # one per head with latent attention
    head_dim: int  # 0 with latent attention
    vocab: int
    ffn: int  # inner width of a dense layer; 0 = there are none
    experts: int = 0  # routed experts of an MoE layer; 0 = a dense model
    top_k: int = 0  # experts per token
    expert_ffn: int = 0
    shared_ffn: int = 0  # inner width of all shared experts of a layer together
    dense_layers: int = 0  # number of first layers that are dense whatever moe_step is; all layers of a dense model
    moe_step: int = 1  # n: after the first dense layers, every n-th layer has experts
    dense_too: tuple[int, ...] = ()  # more dense layers, counted from 0
    mtp_layers: int = 0
    # latent attention (DeepSeek-V3); kv_rank 0 = none, q_rank 0 = the query is one matrix instead of two
    q_rank: int = 0
    kv_rank: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    angles: int = 0  # rows of Megatron's table of rotations for latent attention
    qk_norm: bool = False  # with latent attention: on the low-rank query and key-value
    norm_over_heads: bool = False  # the norms of qk_norm are as wide as all heads together
    gated: bool = True  # three matrices in an MLP instead of two
    attention_bias: bool = False  # on q, k and v
    linear_bias: bool = False  # on every linear layer, including routers
    sinks: bool = False  # each head has one more score, in addition to the scores of the keys
    windows: bool = False  # some layers, or all, attend to a limited number of earlier tokens
    keys: bool = True  # keys have a weight; False: keys and values are those of an earlier layer
    values: bool = True  # values have a weight; False: a value is the key before its norm
    wide: Heads | None = None  # those of wide_layers; None: all layers have the same heads
    wide_layers: tuple[int, ...] = ()  # counted from 0
    borrowing: int = 0  # number of last layers that have the keys and values of an earlier layer of their kind
    borrowing_ffn: int = 0  # inner width of their MLP
    per_layer: int = 0  # width of a token's vector for each layer, in addition to its embedding; 0 = there are none
    layernorm: bool = False  # norms have a bias as well as a weight
    expert_bias: bool = False  # added to routing scores; the trainer adjusts it without gradients: not a parameter
    shared_gate: bool = False  # a gate weights the shared experts for each token
    output_gate: bool = False  # the query's matrix also gives a gate for the output of attention
    delta: DeltaNet | None = None  # the gated delta net that replaces attention in delta_layers, or of mamba blocks
    delta_layers: tuple[int, ...] = ()  # counted from 0
    # Kinds of layers in turn, if layers are one block only: mamba, attention, or the MLP of dense or moe layers.
    blocks: tuple[str, ...] = ()
    latent: int = 0  # width of tokens between the two layers around routed experts; 0 = hidden, without such layers
    tied: bool = False  # the output layer is the embedding
    capped: bool = False  # logits are capped smoothly
    positions: int = 0  # learned positions; 0 = rotary ones, which have no parameters, or none
    rotary: bool = True
    vocab_pad: int = 0  # the vocabulary is padded to a multiple of this * tp; 0 = not padded
    architecture: str = ""
    packed: float = 0.0  # bytes per quantised weight of the release, including its share of a scale; 0 = not quantised
    packed_experts: bool = False  # only routed experts are quantised

    def kind(self, layer: int) -> str:
        """Return the kind of a layer: dense or moe. A layer of one block can also be mamba or attention.

        The prefix delta_ means a gated delta net instead of attention, wide_ other heads, borrowing_ keys and values of
        an earlier layer.
        """
        if self.blocks:
            return self.blocks[layer % len(self.blocks)]
        every = layer >= self.dense_layers and layer not in self.dense_too and (layer + 1) % self.moe_step == 0
        mlp = "moe" if self.experts and every else "dense"
        found = {"delta": layer in self.delta_layers, "wide": layer in self.wide_layers}
        found |= {"borrowing": layer >= self.layers - self.borrowing, mlp: True}
        return "_".join(name for name, there in found.items() if there)

    def of(self, kind: str) -> "ModelFacts":
        """Return the facts with the sizes of layers of this kind."""
        return _of(self, kind) if "_" in kind else self

    @property
    def expert_hidden(self) -> int:
        """Width of the tokens that routed experts see."""
        return self.latent or self.hidden

    def base(self, kind: str) -> str:
        """Return the kind of layer that a multi-token-prediction layer is like: the last ordinary one.

        If layers are one block only, it has two: attention and experts.
        """
        like = "attention_moe" if self.blocks and self.mtp_layers else self.kinds[-1]
        return like if kind == "mtp" else kind

    def blocks_in(self, kind: str) -> int:
        """Return the number of blocks in layers of this kind, each with a norm and a residual sum."""
        return 1 if self.base(kind) in self.blocks else 2

    def routed(self, kind: str) -> bool:
        """Whether layers of this kind have experts."""
        return self.experts > 0 and self.base(kind).endswith("moe")

    def dense(self, kind: str) -> bool:
        """Whether layers of this kind have an MLP without experts."""
        return self.base(kind).endswith("dense")

    def delta_of(self, kind: str) -> DeltaNet | None:
        """Return the gated delta net or Mamba-2 layer in layers of this kind; None if they have none."""
        return self.delta if kind.startswith(("delta", "mamba")) else None

    def mixes(self, kind: str) -> bool:
        """Whether layers of this kind mix tokens, by attention or otherwise."""
        return not self.blocks or self.base(kind).startswith(("attention", "mamba"))

    def attends(self, kind: str) -> bool:
        return self.mixes(kind) and not self.delta_of(kind)

    def cut_blocks(self, kind: str) -> int:
        """Return the number of blocks that tp cuts: what mixes tokens, and an MLP or shared experts."""
        return self.mixes(kind) + (self.dense(kind) or (self.routed(kind) and self.shared_ffn > 0))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.kind(layer) for layer in range(self.layers))

    @cached_property
    def variants(self) -> tuple["ModelFacts", ...]:
        """The facts of all kinds of layers."""
        return tuple(dict.fromkeys(self.of(kind) for kind in self.kinds))

    @property
    def qkv(self) -> int:
        """Outputs of the layer's matrices of queries, keys and values; the query's can also give gates."""
        return (self.heads * (1 + self.output_gate) + (self.keys + self.values) * self.kv_heads) * self.head_dim

    def padded_vocab(self, tp: int) -> int:
        multiple = self.vocab_pad * tp or 1
        return -(-self.vocab // multiple) * multiple


@cache
def _of(facts: ModelFacts, kind: str) -> ModelFacts:
    names = kind.split("_")
    if facts.wide and "wide" in names:
        wide = facts.wide
        facts = replace(facts, kv_heads=wide.kv_heads, head_dim=wide.head_dim, values=wide.values)
    if "borrowing" in names:
        facts = replace(facts, keys=False, values=False, ffn=facts.borrowing_ffn)
    return facts
