"""Rules for FP8, the precision of the optimizer's states and offloading.

    contradictions(run)      (key, problem), for conf/rules/contradictions.py
    widths(run, facts)       sizes that FP8 needs as a multiple of something, for conf/rules/model.py
    beyond_a_cpu(run)        settings that a CPU does not support, for the trainer

Sources: Transformer Engine 2.20 (quantization.py, utils.py, optimizers/fused_adam.py), megatron-core 0.19 (optimizer/,
transformer_config.py) and Megatron-Bridge 0.6 (training/mixed_precision.py).
"""

from collections.abc import Iterator

from conf.model_facts import ModelFacts
from conf.schema.run import Run
from conf.schema.training import Train

MULTIPLE = {"current": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32}  # must divide both sides of a weight
ROWS = {"current": 8, "delayed": 8, "blockwise": 8, "mxfp8": 32}  # must divide the tokens of a rank's product
# CUDA's compute capability of a recipe: the lowest one, and the first one that is too high.
CAPABLE = {"current": (8.9, 99), "delayed": (8.9, 99), "blockwise": (9.0, 99), "mxfp8": (10.0, 12.0)}


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    yield from _of_fp8(run)
    if run.train.loss_scale != Train.model_fields["loss_scale"].default and run.train.precision != "fp16":
        yield "train.loss_scale", f"{run.train.loss_scale:g} has no effect with train.precision {run.train.precision}"
    optimizer, precision = run.optimizer, run.train.precision
    for key, usual in (("states", "fp32"), ("gradients", "fp32"), ("offload", 0.0)):
        if (value := getattr(optimizer, key)) != usual and precision != "bf16":
            yield f"optimizer.{key}", f"{value} needs train.precision bf16; with {precision} it is {usual}"
    for key, usual in (("states", "fp32"), ("offload", 0.0)):
        if (value := getattr(optimizer, key)) != usual and not optimizer.distributed:
            yield f"optimizer.{key}", f"{value} needs optimizer.distributed true"
    if optimizer.offload and optimizer.states != "fp32":
        # core's HybridDeviceOptimizer ignores the types of the states
        yield "optimizer.states", f"{optimizer.states}, but with optimizer.offload all states are fp32"
    if optimizer.states == "fp8" and run.train.fp8 in ("current", "blockwise", "mxfp8"):
        # core then keeps the fp32 weights itself, and loads states in FP8 without their scale: they become 0
        yield "optimizer.states", f"fp8 cannot be resumed with train.fp8 {run.train.fp8}; bf16 can"


def _of_fp8(run: Run) -> Iterator[tuple[str, str]]:
    train, kind = run.train, run.adapter.kind
    if train.fp8 and train.precision != "bf16":
        yield "train.fp8", f"{train.fp8} needs train.precision bf16, but it is {train.precision}"
    if not train.fp8_weights:
        pass
    elif not train.fp8:
        yield "train.fp8_weights", "true, but train.fp8 null computes no products in FP8; current does"
    elif kind == "none":
        yield "train.fp8_weights", "true, but with adapter.kind none training would start from rounded weights; false"
    elif kind == "dora":
        yield "train.fp8_weights", "true, but dora needs norms of the weights; false, or adapter.kind lora"
    elif train.fp8 == "mxfp8":
        # a copy for each direction, both with scales
        yield "train.fp8_weights", "true, but mxfp8 keeps two copies, more than bf16; train.fp8 current keeps one"
    modules = {"moe_act", "layernorm"} & set(train.recompute_modules)
    if train.fp8 == "delayed" and modules:
        yield "train.recompute_modules", f"{min(modules)} is not recomputed under train.fp8 delayed; current allows it"


def widths(run: Run, facts: ModelFacts) -> Iterator[tuple[str, str, int, int]]:
    """Sizes that FP8's products do not support: (key, what, size, the number that must divide it)."""
    layout, fp8 = run.layout, run.train.fp8
    if not fp8:
        return
    hidden, tp, etp = facts.hidden, layout.tp, layout.etp
    by_tp = [("hidden size", hidden), ("shared experts' width over tp", facts.shared_ffn // tp)]
    by_tp += [("dense layers' width over tp", of.ffn // tp) for of in facts.variants]
    if facts.kv_rank:
        by_tp += [("width of the low-rank key-value", facts.kv_rank + facts.qk_rope), ("its rank", facts.kv_rank)]
        by_tp += [("width of the low-rank query", facts.q_rank)]
        by_tp += [("attention's output", facts.heads * facts.v_head // tp)]
    else:
        by_tp += [("width of query, key and value over tp", of.qkv // tp) for of in facts.variants]
        by_tp += [("attention's output over tp", of.heads * of.head_dim // tp) for of in facts.variants]
    experts = [("experts' width over etp", facts.expert_ffn // etp)] if facts.experts else []
    for key, sizes in (("layout.tp", by_tp), ("layout.etp", experts)):
        for what, size in sizes:
            if size % MULTIPLE[fp8]:
                yield key, what, size, MULTIPLE[fp8]
    rows = run.train.micro_batch * run.data.seq_length // layout.cp // (tp if layout.sp else 1)
    if rows % ROWS[fp8]:
        yield "data.seq_length", "tokens of a rank's microbatch", rows, ROWS[fp8]


def beyond_a_cpu(run: Run) -> list[tuple[str, str, str]]:
    """Settings that need CUDA kernels: (key, value, value for a CPU)."""
    settings = [("train.fp8", run.train.fp8 or "null", "null"), ("optimizer.states", run.optimizer.states, "fp32")]
    return [(key, value, usual) for key, value, usual in settings if value != usual]
