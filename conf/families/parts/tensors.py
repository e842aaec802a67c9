"""Tensors of a released model: name, shape, kind and Megatron's layer of each, from the facts of the model.

    layer(facts, kind)      tensors of one layer of a kind, by Llama's names or by names of the family
    ends(facts)             tensors before the first layer, and after the last

A family with different layers defines both functions from the parts below. The planner counts parameters from these
tensors, the check of a released model compares them with its files, and tiny models consist of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from conf.families.parts.sizes import ModelFacts

EXPERT = "{expert}"  # stands for the number of an expert in a name
ROOT = "{root}"  # stands for the beginning of names outside the layers
STACK = ".experts.gate_up_proj"  # ending of a tensor of all experts of a layer
GATED = ("gate_proj", "up_proj", "down_proj")
LAYER_AHEAD = "layers.0."  # the layer's own tensors, after Family.ahead
# By DeepSeek-V3's names, the names of Qwen's releases after Family.ahead.
AHEAD = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
AHEAD = {f"{name}.weight": f"{other}.weight" for name, other in AHEAD.items()}
LAST_AHEAD = "layers.1.final_layernorm.weight"  # Nemotron's name of shared_head.norm
# Kinds that Megatron has no parameter for: a buffer of the router, and a second copy of the embedding or output layer.
BUFFER, COPY = "buffer", "copy"


@dataclass(frozen=True)
class Tensor:
    name: str  # within its layer; outside the layers, within the model
    shape: tuple[int, ...]  # of one expert, unless experts are stacked
    kind: str  # as in KINDS of conf/planner/parameters.py
    part: str = ""  # Megatron's layer, as in adapter.targets; "" = the whole tensor is on every rank of tp
    turned: bool = False  # released as (inputs, outputs); Megatron's layers have (outputs, inputs)
    experts: int = 0  # number of experts that have this tensor; 0 = not a tensor of experts
    stacked: bool = False  # one tensor contains the tensors of all experts

    @property
    def size(self) -> int:
        """Number of elements, of all experts together."""
        return prod(self.shape) * (self.experts if self.experts and not self.stacked else 1)

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Outputs and inputs of one matrix; None if the tensor is not a matrix of a Megatron layer."""
        shape = self.shape[1:] if self.stacked else self.shape
        if not self.part or len(shape) != 2:
            return None
        return (shape[1], shape[0]) if self.turned else (shape[0], shape[1])


Tensors = list[Tensor]


def layer(
    facts: ModelFacts,
    kind: str,
    *,
    mlp: str = "mlp",
    leaves: tuple[str, ...] = GATED,
    shared: str = "shared_experts",
    bias: str = "gate.e_score_correction_bias",
    fused: bool = True,
    ahead: Mapping[str, str] | None = None,
) -> Tensors:
    """Return the tensors of a dense, moe or mtp layer.

    `mlp` is the module of experts, `leaves` are the matrices of an expert, `bias` is added to routing scores. `fused`
    describes gated delta nets, `ahead` the names of an mtp layer.
    """
    base = facts.base(kind)
    found = norms(facts) + (delta_net(facts, fused) if facts.delta_of(base) else attention(facts.of(base)))
    dense = base.endswith("dense")
    found += gated_mlp("mlp", facts.hidden, facts.ffn) if dense else experts(facts, mlp, leaves, shared, bias)
    if kind != "mtp":
        return found
    return found + mtp(facts) if ahead is None else renamed(found + mtp(facts), ahead)


def ends(facts: ModelFacts) -> tuple[Tensors, Tensors]:
    vocabulary = (facts.vocab, facts.hidden)
    head = [] if facts.tied else [Tensor("lm_head.weight", vocabulary, "output")]
    first = [Tensor(f"{ROOT}embed_tokens.weight", vocabulary, "embedding")]
    return first, [Tensor(f"{ROOT}norm.weight", (facts.hidden,), "norms"), *head]


def norms(facts: ModelFacts) -> Tensors:
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return [Tensor(name, (facts.hidden,), "norms") for name in names]


def attention(facts: ModelFacts) -> Tensors:
    return latent_attention(facts) if facts.kv_rank else grouped_attention(facts)


def grouped_attention(facts: ModelFacts) -> Tensors:
    hidden, heads, width = facts.hidden, facts.heads, facts.head_dim
    tensors = [_attention("o_proj.weight", (hidden, heads * width), "linear_proj")]
    counts = {"q": heads * (1 + facts.output_gate)}
    counts |= {name: facts.kv_heads for name, there in (("k", facts.keys), ("v", facts.values)) if there}
    for name, count in counts.items():
        tensors.append(_attention(f"{name}_proj.weight", (count * width, hidden), "linear_qkv"))
        if facts.attention_bias or facts.linear_bias:
            tensors.append(_attention(f"{name}_proj.bias", (count * width,), "linear_qkv"))
        if name != "v" and facts.qk_norm:
            normed = count * width if facts.norm_over_heads else width
            tensors.append(Tensor(f"self_attn.{name}_norm.weight", (normed,), "norms"))
    tensors += [_attention("o_proj.bias", (hidden,), "linear_proj")] if facts.linear_bias else []
    return tensors + ([_attention("sinks", (heads,), "softmax_offset")] if facts.sinks else [])


def delta_net(facts: ModelFacts, fused: bool) -> Tensors:
    """Tensors of a gated delta net. `fused`: its projections are two, as in Qwen3-Next, instead of four."""
    net = facts.delta
    assert net
    mixed, heads = 2 * net.keys + net.values, net.value_heads
    rows = (
        {"qkvz": mixed + net.values, "ba": 2 * heads}
        if fused
        else {"qkv": mixed, "z": net.values, "b": heads, "a": heads}
    )
    return [
        *(
            Tensor(f"linear_attn.in_proj_{name}.weight", (count, facts.hidden), "attention", "in_proj")
            for name, count in rows.items()
        ),
        Tensor("linear_attn.conv1d.weight", (mixed, 1, net.window), "attention", "conv1d"),
        Tensor("linear_attn.A_log", (net.value_heads,), "attention", "A_log"),
        Tensor("linear_attn.dt_bias", (net.value_heads,), "attention", "dt_bias"),
        Tensor("linear_attn.norm.weight", (net.value,), "attention"),
        Tensor("linear_attn.out_proj.weight", (facts.hidden, net.values), "attention", "out_proj"),
    ]


def latent_attention(facts: ModelFacts) -> Tensors:
    hidden, heads = facts.hidden, facts.heads
    query = heads * (facts.qk_nope + facts.qk_rope)
    if facts.q_rank:
        tensors = [
            _attention("q_a_proj.weight", (facts.q_rank, hidden), "linear_q_down_proj"),
            Tensor("self_attn.q_a_layernorm.weight", (facts.q_rank,), "norms"),
            _attention("q_b_proj.weight", (query, facts.q_rank), "linear_q_up_proj"),
        ]
    else:
        tensors = [_attention("q_proj.weight", (query, hidden), "linear_q_proj")]
    down, up = (facts.kv_rank + facts.qk_rope, hidden), (heads * (facts.qk_nope + facts.v_head), facts.kv_rank)
    return [
        *tensors,
        _attention("kv_a_proj_with_mqa.weight", down, "linear_kv_down_proj"),
        Tensor("self_attn.kv_a_layernorm.weight", (facts.kv_rank,), "norms"),
        _attention("kv_b_proj.weight", up, "linear_kv_up_proj"),
        _attention("o_proj.weight", (hidden, heads * facts.v_head), "linear_proj"),
    ]


def _attention(name: str, shape: tuple[int, ...], part: str) -> Tensor:
    return Tensor(f"self_attn.{name}", shape, "attention", part)


def gated_mlp(module: str, hidden: int, width: int, kind: str = "mlp", leaves: tuple[str, ...] = GATED) -> Tensors:
    gate, up, down = (f"{module}.{leaf}.weight" for leaf in leaves)
    return [
        Tensor(gate, (width, hidden), kind, "linear_fc1"),
        Tensor(up, (width, hidden), kind, "linear_fc1"),
        Tensor(down, (hidden, width), kind, "linear_fc2"),
    ]


def experts(facts: ModelFacts, module: str, leaves: tuple[str, ...], shared: str, bias: str) -> Tensors:
    """Return the tensors of the router, the experts and the shared experts of a layer."""
    hidden, count = facts.hidden, facts.experts
    expert = gated_mlp(f"{module}.experts.{EXPERT}", hidden, facts.expert_ffn, "experts", leaves)
    tensors = [Tensor(f"{module}.gate.weight", (count, hidden), "router")]
    tensors += [replace(tensor, experts=count) for tensor in expert]
    if facts.shared_ffn:
        tensors += gated_mlp(f"{module}.{shared}", hidden, facts.shared_ffn, "shared_experts")
    if facts.shared_gate:
        tensors.append(Tensor(f"{module}.{shared}_gate.weight", (1, hidden), "shared_experts"))
    if facts.expert_bias:
        tensors.append(Tensor(f"{module}.{bias}", (count,), BUFFER))
    return tensors


def mtp(facts: ModelFacts) -> Tensors:
    """Return the additional tensors of a multi-token-prediction layer, by DeepSeek-V3's names."""
    hidden = facts.hidden
    tensors = [Tensor(f"{name}.weight", (hidden,), "mtp") for name in ("enorm", "hnorm", "shared_head.norm")]
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    tensors += [Tensor(name, (facts.vocab, hidden), COPY) for name in copies]
    return [*tensors, Tensor("eh_proj.weight", (hidden, 2 * hidden), "mtp", "eh_proj")]


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return the tensors of an mtp layer by other names, without its copies of the embedding and the output layer."""
    return [
        replace(tensor, name=names.get(tensor.name, LAYER_AHEAD + tensor.name))
        for tensor in tensors
        if tensor.kind != COPY
    ]


def within_ahead(name: str) -> str:
    """Return DeepSeek-V3's name of a renamed tensor."""
    usual = {other: usual for usual, other in AHEAD.items()} | {LAST_AHEAD: "shared_head.norm.weight"}
    return usual.get(name, name.removeprefix(LAYER_AHEAD))


def stacked(tensors: Tensors) -> Tensors:
    """Return the tensors of a layer with one tensor for gate and up of all its experts, and one for down."""
    separate = [tensor for tensor in tensors if tensor.experts and not tensor.stacked]
    if not separate:
        return tensors
    _, up, down = separate
    module, count, (width, hidden) = up.name.partition(f".{EXPERT}")[0], up.experts, up.shape
    both = replace(up, name=f"{module}.gate_up_proj", shape=(count, 2 * width, hidden), stacked=True)
    down = replace(down, name=f"{module}.down_proj", shape=(count, hidden, width), stacked=True)
    return [*(tensor for tensor in tensors if tensor not in separate), both, down]


def named(tensors: Tensors, root: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its released name. Separate experts follow each other."""
    for count, group in groupby(tensors, key=lambda tensor: 0 if tensor.stacked else tensor.experts):
        together = list(group)
        for expert in range(count or 1):
            for tensor in together:
                yield tensor.name.replace(EXPERT, str(expert)).replace(ROOT, root), tensor
