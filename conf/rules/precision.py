"""Rules for FP8, the precision of the optimizer's states and offloading: what goes together, and with what.

    contradictions(run)      (key, problem) for values that are right alone and wrong together;
    conf/rules/contradictions.py asks
    widths(run, facts)       sizes that FP8 needs as a multiple of something; conf/rules/layout.py asks
    beyond_a_cpu(run)        what a CPU cannot do; the trainer asks

Read off Transformer Engine 2.20 (quantization.py, utils.py, optimizers/fused_adam.py), megatron-core 0.19 (optimizer/,
transformer_config.py) and Megatron-Bridge 0.6 (training/mixed_precision.py).
"""

from collections.abc import Iterator

from conf.model_facts import ModelFacts
from conf.schema.run import Run
from conf.schema.training import Train

MULTIPLE = {"current": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32}  # of both sides of a weight
ROWS = {"current": 8, "delayed": 8, "blockwise": 8, "mxfp8": 32}  # of the tokens that a rank multiplies with it
# CUDA's compute capability that a recipe takes: at least, and below.
CAPABLE = {"current": (8.9, 99), "delayed": (8.9, 99), "blockwise": (9.0, 99), "mxfp8": (10.0, 12.0)}


LOSS_SCALE = Train.model_fields["loss_scale"].default


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    yield from _of_fp8(run)
    if run.train.loss_scale != LOSS_SCALE and run.train.precision != "fp16":
        yield "train.loss_scale", f"{run.train.loss_scale:g} has no effect with train.precision {run.train.precision}"
    optimizer, precision = run.optimizer, run.train.precision
    for key, usual in (("states", "fp32"), ("gradients", "fp32"), ("offload", 0.0)):
        if (value := getattr(optimizer, key)) != usual and precision != "bf16":
            yield f"optimizer.{key}", f"{value} needs train.precision bf16; with {precision} it is {usual}"
    for key, usual in (("states", "fp32"), ("offload", 0.0)):
        if (value := getattr(optimizer, key)) != usual and not optimizer.distributed:
            yield f"optimizer.{key}", f"{value} needs optimizer.distributed true"
    if optimizer.offload and optimizer.states != "fp32":
        # core's HybridDeviceOptimizer makes both of its parts without the types of the states
        yield "optimizer.states", f"{optimizer.states}, but with optimizer.offload all states are fp32"
    if optimizer.states == "fp8" and run.train.fp8 in ("current", "blockwise", "mxfp8"):
        # core keeps the fp32 weights itself then, and loads states in FP8 without their scale: they come back as 0
        yield "optimizer.states", f"fp8 cannot be resumed with train.fp8 {run.train.fp8}; bf16 can"


def _of_fp8(run: Run) -> Iterator[tuple[str, str]]:
    train, kind = run.train, run.adapter.kind
    if train.fp8 and train.precision != "bf16":
        yield "train.fp8", f"{train.fp8} needs train.precision bf16, and it is {train.precision}"
    if not train.fp8_weights:
        pass
    elif not train.fp8:
        yield "train.fp8_weights", "true, but train.fp8 is null: nothing could multiply with them; current can"
    elif kind == "none":
        yield "train.fp8_weights", "true, but with adapter.kind none training would start from rounded weights; false"
    elif kind == "dora":
        yield "train.fp8_weights", "true, but dora takes norms of the weights; false, or adapter.kind lora"
    elif train.fp8 == "mxfp8":
        # a copy for either direction, and both with scales
        yield "train.fp8_weights", "true, but mxfp8 keeps two copies, more than bf16 takes; train.fp8 current keeps one"
    modules = {"moe_act", "layernorm"} & set(train.recompute_modules)
    if train.fp8 == "delayed" and modules:
        yield "train.recompute_modules", f"{min(modules)} is not recomputed under train.fp8 delayed; current allows it"


def widths(run: Run, facts: ModelFacts) -> Iterator[tuple[str, str, int, int]]:
    """Sizes that FP8 has no product for: (key, what, size, the number that has to divide it)."""
    layout, fp8 = run.layout, run.train.fp8
    if not fp8:
        return
    hidden, tp, etp = facts.hidden, layout.tp, layout.etp
    by_tp = {"hidden size": hidden, "dense layers' width over tp": facts.ffn // tp}
    by_tp["shared experts' width over tp"] = facts.shared_ffn // tp
    if facts.kv_rank:
        by_tp |= {"width of the low-rank key-value": facts.kv_rank + facts.qk_rope, "its rank": facts.kv_rank}
        by_tp |= {"width of the low-rank query": facts.q_rank, "attention's output": facts.heads * facts.v_head // tp}
    else:
        by_tp["width of query, key and value over tp"] = (facts.heads + 2 * facts.kv_heads) * facts.head_dim // tp
        by_tp["attention's output over tp"] = facts.heads * facts.head_dim // tp
    experts = {"experts' width over etp": facts.expert_ffn // etp} if facts.experts else {}
    for key, sizes in (("layout.tp", by_tp), ("layout.etp", experts)):
        for what, size in sizes.items():
            if size % MULTIPLE[fp8]:
                yield key, what, size, MULTIPLE[fp8]
    rows = run.train.micro_batch * run.data.seq_length // layout.cp // (tp if layout.sp else 1)
    if rows % ROWS[fp8]:
        yield "data.seq_length", "tokens of a rank's microbatch", rows, ROWS[fp8]


def beyond_a_cpu(run: Run) -> list[tuple[str, str, str]]:
    """Settings that only CUDA kernels can do: (key, value, value that a CPU takes)."""
    found = []
    if run.train.fp8:
        found.append(("train.fp8", run.train.fp8, "null"))
    if run.optimizer.states != "fp32":
        found.append(("optimizer.states", run.optimizer.states, "fp32"))
    return found
