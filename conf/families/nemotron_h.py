"""Nemotron-H, Nemotron 3 Nano and Super: each layer is one block, a Mamba-2 layer, attention, experts or an MLP.

Attention has no positions. Experts of Super see tokens of a smaller width, moe_latent_size. Its multi-token-prediction
layer (mtp.*) consists of two blocks, attention and experts. transformers does not build it.

Without kernels, as on a CPU, transformers raises time steps to time_step_min, and so does Megatron's model on a CPU.
Mamba's kernels and vLLM do not, and neither does Megatron's model on a GPU.
"""

from dataclasses import replace

from conf.families.parts import tensors
from conf.families.parts.family import Balance, Family, Serving
from conf.families.parts.keys import Keys
from conf.families.parts.sizes import DeltaNet, ModelFacts
from conf.families.parts.tensors import BUFFER, EXPERT, ROOT, Tensor, Tensors, grouped_attention
from contract.json_object import show

BLOCKS = {"mamba": "mamba", "attention": "attention", "moe": "moe", "mlp": "dense"}  # transformers' names, and ours
EMBEDDING = "embeddings.weight"
LETTERS = dict(zip("M*E-", BLOCKS, strict=True))
SIZES = {"vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"}
NETS = {"mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "time_step_min"}
NETS |= {"mamba_n_groups", "mamba_d_conv", "mamba_dt_min"}  # older names, which transformers prefers
SHARED = "moe_shared_expert_intermediate_size"
EXPERTS = {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", SHARED, "moe_latent_size"}
ROUTING = ("routed_scaling_factor", "n_group", "topk_group")
LAYERS = {"layers_block_type", "hybrid_override_pattern", "num_hidden_layers"}
OF_AHEAD = {"num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"}
# How Mamba's kernels work, initial values, and keys that no code reads.
UNUSED = {"chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "moe_shared_expert_overlap"}
UNUSED |= {"rescale_prenorm_residual", "time_step_max", "time_step_floor", "mamba_dt_max", "mamba_dt_init_floor"}
UNUSED |= {"expand", "mamba_expand", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"}
UNUSED |= {"norm_eps", "rms_norm_eps", "num_logits_to_keep"}
UNLIMITED = ([0.0, {"__float__": "Infinity"}],)  # as contract/json_object.py reads Infinity
FIXED = {"n_shared_experts": 1, "tie_word_embeddings": False, "use_bias": False, "mlp_bias": False}
FIXED |= {"attention_bias": False, "mamba_proj_bias": False}


def facts(keys: Keys) -> ModelFacts:
    size, blocks = keys.size, _blocks(keys)
    moe, dense, mamba = (kind in blocks for kind in ("moe", "dense", "mamba"))
    net = _net(keys) if mamba else None
    return ModelFacts(
        layers=len(blocks),
        blocks=blocks,
        mtp_layers=_ahead(keys, moe),
        hidden=size("hidden_size", least=1),
        heads=size("num_attention_heads", least=1),
        kv_heads=size("num_key_value_heads", least=1),
        head_dim=size("head_dim", least=1),
        vocab=size("vocab_size", least=1),
        ffn=size("intermediate_size", least=1) if dense else 0,
        experts=size("n_routed_experts", least=1) if moe else 0,
        top_k=size("num_experts_per_tok", least=1) if moe else 0,
        expert_ffn=size("moe_intermediate_size", least=1) if moe else 0,
        shared_ffn=size(SHARED, least=1) if moe else 0,
        latent=size("moe_latent_size", default=0, least=1) if moe else 0,
        expert_bias=moe,
        gated=False,
        rotary=False,
        delta=net,
    )


def _net(keys: Keys) -> DeltaNet:
    net = DeltaNet(
        key_heads=keys.size("mamba_n_groups", "n_groups", least=1),
        value_heads=keys.size("mamba_num_heads", least=1),
        key=keys.size("ssm_state_size", least=1),
        value=keys.size("mamba_head_dim", least=1),
        window=keys.size("mamba_d_conv", "conv_kernel", least=1),
        scan=True,
    )
    if net.value_heads % net.key_heads:
        text = f"n_groups is {net.key_heads}, which does not divide mamba_num_heads, {net.value_heads}"
        raise ValueError(f"config.json: {text}")
    return net


def _blocks(keys: Keys) -> tuple[str, ...]:
    listed, pattern = keys.config.get("layers_block_type"), keys.config.get("hybrid_override_pattern")
    names = [LETTERS.get(letter) for letter in pattern] if listed is None and isinstance(pattern, str) else listed
    if not isinstance(names, list) or not names or not {*map(str, names)} <= BLOCKS.keys():
        text = f"{show(listed)} and hybrid_override_pattern {show(pattern)}, but one of them must describe each layer"
        raise ValueError(f"config.json: layers_block_type is {text}: {', '.join(BLOCKS)}, or {' '.join(LETTERS)}")
    count = keys.size("num_hidden_layers", default=len(names))
    if count != len(names):
        raise ValueError(f"config.json: num_hidden_layers is {count}, but {len(names)} layers are described")
    return tuple(BLOCKS[str(name)] for name in names)


def _ahead(keys: Keys, moe: bool) -> int:
    """Return the number of multi-token-prediction layers. Their keys are read in the order of transformers."""
    count, usual = keys.size("num_nextn_predict_layers", default=0), ["attention", "moe"]
    blocks, pattern = keys.config.get("mtp_layers_block_type") or usual, keys.config.get("mtp_hybrid_override_pattern")
    if blocks == usual and isinstance(pattern, str):
        blocks = [LETTERS.get(letter) for letter in pattern]
    if count and (count > 1 or blocks != usual or not moe):
        described = f"{count} of {show(blocks)} in a model {'with' if moe else 'without'} experts"
        text = "but only 1 of attention and moe is supported, in a model with experts; with 0 it is copied"
        raise ValueError(f"config.json: num_nextn_predict_layers is {described}, {text}")
    return count


def layer(facts: ModelFacts, kind: str) -> Tensors:
    found = [_block(facts, block) for block in facts.base(kind).split("_")]
    if kind != "mtp":
        return [tensor for block in found for tensor in block]
    found = [
        replace(tensor, name=f"layers.{number}.{tensor.name}") for number, block in enumerate(found) for tensor in block
    ]
    return found + tensors.renamed(tensors.mtp(facts), {"shared_head.norm.weight": tensors.LAST_AHEAD})


def _block(facts: ModelFacts, kind: str) -> Tensors:
    parts = {"mamba": _mamba, "attention": grouped_attention, "moe": _experts, "dense": _mlp}[kind](facts)
    parts = [replace(part, name=f"mixer.{part.name.removeprefix('self_attn.')}") for part in parts]
    return [Tensor("norm.weight", (facts.hidden,), "norms"), *parts]


def _mamba(facts: ModelFacts) -> Tensors:
    net = facts.delta
    assert net
    heads, mixed = net.value_heads, net.values + 2 * net.keys
    return [
        Tensor("in_proj.weight", (net.values + mixed + heads, facts.hidden), "attention", "in_proj"),
        Tensor("conv1d.weight", (mixed, 1, net.window), "attention", "conv1d_weight"),
        Tensor("conv1d.bias", (mixed,), "attention", "conv1d_bias"),
        *(Tensor(name, (heads,), "attention", name) for name in ("A_log", "D", "dt_bias")),
        Tensor("norm.weight", (net.values,), "attention", "norm"),
        Tensor("out_proj.weight", (facts.hidden, net.values), "attention", "out_proj"),
    ]


def _mlp(facts: ModelFacts) -> Tensors:
    return _two("", facts.hidden, facts.ffn, "mlp")


def _experts(facts: ModelFacts) -> Tensors:
    hidden, count, seen = facts.hidden, facts.experts, facts.latent or facts.hidden
    latent = {"fc1_latent_proj": (seen, hidden), "fc2_latent_proj": (hidden, seen)} if facts.latent else {}
    return [
        Tensor("gate.weight", (count, hidden), "router"),
        Tensor("gate.e_score_correction_bias", (count,), BUFFER),
        *(Tensor(f"{name}.weight", shape, "shared_experts", name) for name, shape in latent.items()),
        *(replace(part, experts=count) for part in _two(f"experts.{EXPERT}.", seen, facts.expert_ffn, "experts")),
        *_two("shared_experts.", hidden, facts.shared_ffn, "shared_experts"),
    ]


def _two(module: str, hidden: int, width: int, kind: str) -> Tensors:
    return [
        Tensor(f"{module}up_proj.weight", (width, hidden), kind, "linear_fc1"),
        Tensor(f"{module}down_proj.weight", (hidden, width), kind, "linear_fc2"),
    ]


def ends(facts: ModelFacts) -> tuple[Tensors, Tensors]:
    vocabulary = (facts.vocab, facts.hidden)
    last = Tensor(f"{ROOT}norm_f.weight", (facts.hidden,), "norms")
    return [Tensor(ROOT + EMBEDDING, vocabulary, "embedding")], [last, Tensor("lm_head.weight", vocabulary, "output")]


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    read=SIZES | NETS | EXPERTS | LAYERS | OF_AHEAD | UNUSED | {*ROUTING, *FIXED, "layer_norm_epsilon"},
    assumed={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "norm_topk_prob": (True,)}
    | {"time_step_limit": UNLIMITED, "mamba_dt_limit": UNLIMITED, "residual_in_fp32": (False,)}
    | {"use_conv_bias": (True,), "mamba_conv_bias": (True,)},
    fixed=FIXED,
    not_null=(*ROUTING, "layer_norm_epsilon", "time_step_min", "chunk_size", "intermediate_size"),
    defaults={"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": True},
    facts=facts,
    layer=layer,
    ends=ends,
    roots=("backbone.", "model."),
    embedding=EMBEDDING,
    as_saved={f"backbone.{EMBEDDING}": "backbone.embedding.weight"},
    by_name=True,
    balance=Balance(always=True, moves_bias=True),
    serving=Serving(on_cpu="vLLM's kernels of Mamba-2 need a GPU"),
    ahead="mtp.",
    constants={"mixer.D": 1.0, "dt_bias": -3.0, "norm_f.weight": 1.0},
    releases={
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 123.6,
    },
)
