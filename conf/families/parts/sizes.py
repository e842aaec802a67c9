"""Facts of a model that the planner, the rules and the list of tensors need: sizes, and kinds of layers."""

from dataclasses import dataclass
from functools import cached_property


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
    layernorm: bool = False  # norms have a bias as well as a weight
    expert_bias: bool = False  # added to routing scores; the trainer adjusts it without gradients: not a parameter
    shared_gate: bool = False  # a gate weights the shared experts for each token
    tied: bool = False  # the output layer is the embedding
    positions: int = 0  # learned positions; 0 = rotary ones, which have no parameters
    vocab_pad: int = 0  # the vocabulary is padded to a multiple of this * tp; 0 = not padded
    architecture: str = ""
    packed: float = 0.0  # bytes per quantised weight of the release, including its share of a scale; 0 = not quantised
    packed_experts: bool = False  # only routed experts are quantised

    def kind(self, layer: int) -> str:
        """Return the kind of a layer: dense or moe."""
        if layer < self.dense_layers or layer in self.dense_too or not self.experts:
            return "dense"
        return "moe" if (layer + 1) % self.moe_step == 0 else "dense"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.kind(layer) for layer in range(self.layers))

    def padded_vocab(self, tp: int) -> int:
        multiple = self.vocab_pad * tp or 1
        return -(-self.vocab // multiple) * multiple
