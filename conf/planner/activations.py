"""Bytes that one layer keeps from forward to backward, and further bytes that it needs while it runs.

The rules are read from the code of the layers in a GPU run: megatron-core 0.19 (attention.py, mlp.py, moe/),
Transformer Engine 2.20 (fused norm and linear, fused attention, grouped linears, permutation), Megatron-Bridge 0.6
(adapters):

    linear layers   keep their input for the gradient of their weight. Frozen layers keep nothing: the gradient of the
                    input needs only the weight. An adapter keeps its own input instead, and with dropout a copy with
                    a mask of 1 byte. With sequence parallelism adapters keep the gathered input, not cut by tp
    attention       keeps q, k, v and its output; in fp32, which has no fused kernel, also a matrix of tokens by tokens
    gated MLP       keeps both halves of fc1's output: silu and the product are one kernel (trainer/startup/device.py)
    experts         see each token top_k times: micro_batch * sequence / cp / (tp if sp) * top_k * etp on average
    permutations    keep maps of indices; all-to-all and un-permutation keep no tokens
    FP8             trained layers keep their input in FP8, unless another layer keeps it in bf16 (core's
                    save_original_input, which delayed scaling does not support). Adapters compute in bf16 and keep
                    bf16, except those of each expert. The tokens of an expert are padded to a multiple of 16 (mxfp8:
                    32). A frozen layer with a norm keeps the norm's output in FP8 if an adapter uses that output
                    (Transformer Engine's LayerNormLinear saves everything that it returns)
    recomputation   a layer keeps its input. A dispatcher also holds the routing of the last forward pass;
                    trainer/patches/kept_routes.py cannot drop that of the first pass, which has no graph
    loss            Transformer Engine's loss works on a copy of the logits
    dropout         keeps a mask of 1 byte for the outputs of attention and MLP; fused attention draws its numbers
                    again, without a mask

Not covered: buffers of DeepEP (dispatcher flex), activation offloading, pieces in a ring of cp ranks, the weight of
DoRA's norm, and attention dropout without a fused kernel (fp32).
"""

from dataclasses import dataclass

from conf import families
from conf.families.parts.sizes import DeltaNet
from conf.model_facts import ModelFacts
from conf.rules import chunked_loss, objectives, packed_base, precision, reinforcement
from conf.schema.run import Run
from conf.schema.sections import Adapter
from conf.schema.training import Train

# Tokens of the busiest expert-parallel rank relative to the average: a loss balances the router, but not exactly.
IMBALANCE = 1.2
# Bytes per token and expert that routing keeps: logits, scores, probabilities and the loss's scores (fp32 each), a map
# (bool), and the permutation's maps of rows (two int32).
ROUTING = 4 * 4 + 1 + 2 * 4
HELD_ROUTING = 4 + 1 + 2 * 4  # the part that a dispatcher holds: probabilities and both maps
# Layers of these models that are not recomputed keep more than the tensors that are counted here: 10 of Qwen3.5's 40
# layers and 8 of Gemma 4's 30, on an H200. Which tensors is not known.
UNCOUNTED = 1.3
DELTA_CHUNK = 64  # tokens that the kernels of a gated delta rule compute together
# Bytes of a number in FP8, with its share of a scale: 4 bytes for 128 numbers, or 1 byte for 32.
LOW = {"current": 1.0, "delayed": 1.0, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}


@dataclass(frozen=True)
class Tokens:
    """Numbers of tokens of one microbatch on one rank."""

    whole: int  # of the rank's part of the sequence
    local: int  # the same, cut by sequence parallelism: the tokens of norms and routers
    routed: int  # of its experts, on average
    busiest: int  # of the experts of the busiest rank
    byte: int  # bytes of a number


def tokens(run: Run, facts: ModelFacts) -> Tokens:
    layout, train = run.layout, run.train
    whole = train.micro_batch * objectives.sequences(train) * run.data.seq_length // layout.cp
    local = whole // layout.tp if layout.sp else whole
    uneven = IMBALANCE if layout.ep > 1 and not run.moe.force_balance else 1.0
    routed = local * facts.top_k * layout.etp if facts.experts else 0
    # on average, padding fills half of this
    filled = facts.experts // layout.ep * precision.MULTIPLE[train.fp8] // 2 if train.fp8 and facts.experts else 0
    return Tokens(whole, local, routed, int(routed * uneven) + filled, 4 if train.precision == "fp32" else 2)


def kinds(facts: ModelFacts) -> list[str]:
    """Return the kinds of layers that a model may have. An mtp layer is a layer of the last kind with additions."""
    return [*dict.fromkeys(("dense", *facts.kinds, *(["moe"] if facts.experts else []), "mtp"))]


def kept(run: Run, facts: ModelFacts, kind: str, whole: int) -> int:
    """Return the bytes that one layer keeps of a microbatch from forward to backward. `whole` is the sum of its parts.

    With full recomputation it is the figure of a block of layers, which keeps only its input.
    """
    if run.train.recompute != "full":
        return held(facts, whole)
    t, layers = tokens(run, facts), 1 if kind == "mtp" else run.train.recompute_layers
    return t.local * facts.hidden * t.byte + (layers * _held_routing(facts, t) if facts.routed(kind) else 0)


def held(facts: ModelFacts, whole: int) -> int:
    """Return the bytes that a layer keeps if none of it is recomputed."""
    gated_nets = facts.delta is not None and not facts.delta.scan
    return int(whole * UNCOUNTED) if gated_nets or facts.wide else whole


def _held_routing(facts: ModelFacts, t: Tokens) -> int:
    return t.local * facts.experts * HELD_ROUTING


def parts(run: Run, facts: ModelFacts, kind: str) -> dict[str, int]:
    """Return the bytes by part that one layer of a kind keeps, without full recompute."""
    mtp, kind = kind == "mtp", facts.base(kind)
    facts, t = facts.of(kind), tokens(run, facts)
    found = {"norms": _norms(run.train, facts, t, kind)}
    if facts.mixes(kind):
        net = facts.delta_of(kind)
        found["attention"] = _delta_net(run, facts, net, t) if net else _attention(run, facts, t)
    if facts.dense(kind):
        found["mlp"] = 0 if "mlp" in run.train.recompute_modules else _dense(run, t, facts, facts.ffn, facts.hidden)
        found["mlp"] += _returned(run, "linear_fc1", found["mlp"] and t.whole * facts.hidden)
    if facts.routed(kind):
        found |= _moe(run, facts, t)
    if facts.per_layer:  # two gates and two projections; and this layer's part of three tensors of all layers
        found["per_layer"] = t.local * (2 * facts.hidden + 6 * facts.per_layer) * t.byte
    if run.model.dropout:
        found["dropout"] = facts.blocks_in(kind) * t.local * facts.hidden
    if run.train.cuda_graphs:  # a graph reads its input at a fixed address
        found["recorded"] = t.local * facts.hidden * t.byte
    if mtp:  # the embedding and the hidden state: normed, joined and projected
        found["mtp"] = t.local * facts.hidden * t.byte * 5
    return found


def working(run: Run, facts: ModelFacts, kind: str, whole: int) -> dict[str, int]:
    """Return the additional bytes that a layer needs in its backward pass. `whole` is the sum of its parts.

    They are recomputed activations, gradients, and tokens that are being sent.
    """
    t = tokens(run, facts)
    again = 0
    if run.train.recompute == "full":
        again = whole * (1 if kind == "mtp" else run.train.recompute_layers)
    elif run.train.recompute == "selective":
        bare = run.changed(train={"recompute_modules": ()})
        again = sum(parts(bare, facts, kind).values()) - whole
    gate = 2 if facts.gated else 1
    width = t.whole * max(attention_width(facts.of(kind)), facts.of(kind).ffn * gate) // run.layout.tp
    dense = t.local * facts.hidden * 2 + width
    # A gradient in FP8; if weights are trained, in both layouts.
    low = LOW.get(run.train.fp8 or "", 0.0) * (2 if run.adapter.kind == "none" else 1)
    dispatch = 0
    if facts.routed(kind):
        # Gradients of fc1's output and of its input, the latter once from the weight, once from the adapter, and their
        # sum, which replaces one of both if the weight is packed. A forward pass has as many: permuted, received and
        # sorted tokens.
        copies = 3 if _adapted(run.adapter, "linear_fc1") and packed_base.format_of(run) is None else 2
        inner = facts.expert_ffn * gate // run.layout.etp
        # etp sums the experts' output in fp32
        dispatch = t.busiest * (inner + copies * facts.expert_hidden) * t.byte
        dispatch += t.busiest * facts.expert_hidden * 4 if run.layout.etp > 1 else 0
        if low:  # and the tokens before padding
            dispatch += int(t.busiest * (inner * low + facts.expert_hidden * t.byte))
    return {"dispatch": dispatch, "working": again + dense * t.byte + int(width * low)}


def at_loss(run: Run, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes in use while the loss is computed, including the last layer's output and its norm."""
    t = tokens(run, facts)
    return {"logits": logits(run, facts), "dispatch": 0, "working": 2 * t.local * facts.hidden * t.byte}


def logits(run: Run, facts: ModelFacts) -> int:
    """Return the bytes of the logits at the loss, of the model and of each MTP layer, or of a chunk of tokens.

    The gradient replaces the logits, or the copy that Transformer Engine's loss makes of them.
    """
    t = tokens(run, facts)
    chunked = chunked_loss.is_chunked(run)
    rows = t.whole * facts.padded_vocab(run.layout.tp) // run.layout.tp
    rows = min(rows, chunked_loss.LOGITS) if chunked else rows
    # In fp32: the logits minus their maximum, and the exponentials. Distillation also has logits divided by its
    # temperature. Transformer Engine's loss makes neither, but does not support fp16, in which GPT2-large took 13.6 GB
    # more on an H200. It copies the logits: with 8,192 tokens, Qwen3-30B-A3B and Llama-3.1-8B had two copies of 2.1 and
    # 2.5 GB on an H100.
    twice = run.train.z_loss or run.train.precision == "fp16"
    # A policy has fp32 logits (trainer/reinforcement/policy/exact_logits.py), and their gradient is rounded.
    exact = reinforcement.is_policy(run) and run.train.precision == "bf16"
    of_each = t.byte + (4 if exact else 0)
    has_teacher = objectives.has_teacher(run)
    own_loss = has_teacher or run.train.precision == "fp16"
    copied = 0 if own_loss else rows * (4 if exact else t.byte)
    copied += rows * t.byte if facts.capped else 0  # kept for the gradient
    in_fp32 = 12 * rows if has_teacher else 8 * rows if twice else 0
    outputs_at_once = 1 if chunked else 1 + (facts.mtp_layers if run.model.mtp else 0)
    return rows * of_each * outputs_at_once + copied + in_fp32


def outputs(run: Run) -> int:
    """Return the bytes of a reference model's outputs for the rows of one batch: log-probabilities and tokens."""
    rows = run.train.micro_batch * objectives.AT_ONCE * run.layout.pp
    if not objectives.has_teacher(run):
        return 4 * objectives.sequences(run.train) * rows
    return (4 + 8) * run.train.teacher_top_k * run.data.seq_length * rows


def _adapted(adapter: Adapter, name: str) -> bool:
    return adapter.kind != "none" and name in adapter.names


def _input(
    run: Run, t: Tokens, name: str, size: int, held: bool = False, drops: bool = False, grouped: bool = False
) -> int:
    """Return the bytes that a linear layer keeps of `size` inputs.

    `held` means that another layer keeps them, `drops` that they are recomputed.
    """
    fp8, each = run.train.fp8, t.byte
    if run.adapter.kind == "none":
        if fp8:
            return 0 if drops or (held and fp8 != "delayed") else int(size * LOW[fp8])
        return 0 if held or drops else size * t.byte
    if not _adapted(run.adapter, name):
        return 0
    if fp8 and grouped and run.adapter.experts == "each" and run.moe.grouped_gemm:
        each = LOW[fp8]
    if run.adapter.dropout:
        return int(size * (each + 1))  # its own copy, which is never recomputed
    return 0 if held or drops else int(size * each)


def _returned(run: Run, name: str, size: int) -> int:
    """Return the bytes that a frozen layer with a norm keeps in FP8 of the norm's output, which an adapter uses."""
    return int(size * LOW[run.train.fp8]) if run.train.fp8 and _adapted(run.adapter, name) else 0


def _lora(run: Run, t: Tokens, name: str, rows: int, out: int) -> int:
    """Return the bytes that an adapter keeps in addition to its input: the values between A and B.

    DoRA also keeps the output that it scales.
    """
    if not _adapted(run.adapter, name):
        return 0
    return rows * (run.adapter.rank + (out if run.adapter.kind == "dora" else 0)) * t.byte


def _norms(train: Train, facts: ModelFacts, t: Tokens, kind: str) -> int:
    """Return the bytes that norms keep: their inputs, such as the layer's input and the sum after attention.

    Before experts, they keep the norm's output too.
    """
    norms = {tensor.name for tensor in families.layer(facts, kind, "norms") if tensor.shape == (facts.hidden,)}
    inputs = sum(name.endswith("weight") and not name.startswith("self_attn") for name in norms)
    drops = "layernorm" in train.recompute_modules or "moe" in train.recompute_modules
    out = 0 if not facts.routed(kind) or drops else 1
    return t.local * facts.hidden * t.byte * (inputs + out)


def attention_width(facts: ModelFacts) -> int:
    """Return the width of q, k and v of all heads together."""
    if facts.kv_rank:
        return facts.heads * (2 * (facts.qk_nope + facts.qk_rope) + facts.v_head)
    return facts.qkv


def _attention(run: Run, facts: ModelFacts, t: Tokens) -> int:
    layout, again = run.layout, run.train.recompute_modules
    gathered = t.whole if run.adapter.kind != "none" else t.local
    kv_cut = min(layout.tp, facts.kv_heads)
    if facts.kv_rank:
        out = t.whole * facts.heads * facts.v_head // layout.tp
        inner = 0 if "mla_up_proj" in again else t.whole * attention_width(facts) // layout.tp
        # the low-rank q and kv, before and after their norms
        inner += t.local * 2 * (facts.q_rank + facts.kv_rank + facts.qk_rope)
        total = inner * t.byte + _input(run, t, "linear_q_down_proj", t.local * facts.hidden)
        if run.train.fp8 and run.adapter.kind == "none" and facts.q_rank:  # each down projection has an FP8 copy
            total += _input(run, t, "linear_kv_down_proj", t.local * facts.hidden)
        for name in ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"):
            total += _lora(run, t, name, t.whole, 0)
    else:
        query = t.whole * facts.heads * facts.head_dim // layout.tp
        keys = t.whole * facts.kv_heads * facts.head_dim // kv_cut if facts.keys else 0
        out = query
        # norms of q and k keep their inputs
        inner = (query + 2 * keys) + (query + keys if facts.qk_norm else 0)
        total = inner * t.byte + _input(run, t, "linear_qkv", gathered * facts.hidden)
        total += _returned(run, "linear_qkv", gathered * facts.hidden)
        total += _lora(run, t, "linear_qkv", t.whole, facts.qkv // layout.tp)
    # attention keeps its output for its backward pass, unless it is recomputed
    total += 0 if "core_attn" in again and not _input(run, t, "linear_proj", out) else out * t.byte
    total += _input(run, t, "linear_proj", out, held=True) + _lora(run, t, "linear_proj", t.whole, facts.hidden)
    total += t.whole * facts.heads // layout.tp * 4  # the logarithms of softmax's sums
    if t.byte == 4 and "core_attn" not in again:
        total += 2 * t.whole * run.data.seq_length * facts.heads // layout.tp * 4  # scores and softmax
    return total


def _delta_net(run: Run, facts: ModelFacts, net: DeltaNet, t: Tokens) -> int:
    """Return the bytes that a gated delta net or a Mamba layer keeps: inputs of its parts.

    Queries and keys are copied for each head of values.
    """
    gathered = t.whole if run.adapter.kind != "none" else t.local
    mixed, copied = 2 * net.keys + net.values, 2 * net.value_heads * net.key
    # the input of the convolution and of its activation, keys before and after their norm, copies, values, the gate in
    # bf16 and fp32, the rule's output, its norm and the gated output
    numbers = 2 * mixed + 2 * net.keys + copied + net.values * (2 + 2 + 3)
    if net.scan:  # the gate, the norm and their products are in fp32
        numbers = 3 * mixed + copied + net.values * (3 + 4 * 4 // t.byte)
    exact = net.value_heads * (3 + DELTA_CHUNK)  # decays and strengths, and the products of each chunk's keys, in fp32
    total = t.whole * (numbers * t.byte + exact * 4) // run.layout.tp + _input(
        run, t, "in_proj", gathered * facts.hidden
    )
    total += _lora(run, t, "in_proj", t.whole, (mixed + net.values) // run.layout.tp)
    return total + _lora(run, t, "out_proj", t.whole, facts.hidden)


def _dense(run: Run, t: Tokens, facts: ModelFacts, width: int, hidden: int) -> int:
    """Return the bytes that a dense MLP or the shared experts keep."""
    gathered = t.whole if run.adapter.kind != "none" else t.local
    inner, gate = t.whole * width // run.layout.tp, 2 if facts.gated else 1
    total = _input(run, t, "linear_fc1", gathered * hidden) + inner * gate * t.byte
    total += _input(run, t, "linear_fc2", inner)
    total += _lora(run, t, "linear_fc1", t.whole, gate * width // run.layout.tp)
    return total + _lora(run, t, "linear_fc2", t.whole, hidden)


def _moe(run: Run, facts: ModelFacts, t: Tokens) -> dict[str, int]:
    again, etp, gate = run.train.recompute_modules, run.layout.etp, 2 if facts.gated else 1
    if "moe" in again:  # the input of the MoE layer, which is the norm's output
        return {"experts": t.local * facts.hidden * t.byte, "router": _held_routing(facts, t)}
    inner = t.busiest * facts.expert_ffn // etp
    experts = _input(run, t, "linear_fc1", t.busiest * facts.expert_hidden, grouped=True) + inner * gate * t.byte
    experts += _input(run, t, "linear_fc2", inner, drops="moe_act" in again, grouped=True)
    experts += _lora(run, t, "linear_fc1", t.busiest, gate * facts.expert_ffn // etp)
    experts += _lora(run, t, "linear_fc2", t.busiest, facts.expert_hidden)
    for name, width in ("fc1_latent_proj", facts.hidden), ("fc2_latent_proj", facts.latent):
        if facts.latent:
            experts += _input(run, t, name, t.local * width) + _lora(run, t, name, t.local, facts.hidden)
    experts += t.busiest * (4 + 4 + 4)  # probabilities, and the sort's maps of rows in both directions
    found = {"experts": experts, "router": t.local * facts.experts * ROUTING}
    if facts.shared_ffn and "shared_experts" not in again:
        # without tp, fc1's input is the norm's output, which the router keeps
        shared = _dense(run, t, facts, facts.shared_ffn, facts.hidden)
        drops = run.adapter.kind != "none" and run.adapter.dropout
        if not run.layout.sp and not drops and run.train.fp8 != "delayed":
            shared -= _input(run, t, "linear_fc1", t.whole * facts.hidden)
        found["shared experts"] = shared
    return found
