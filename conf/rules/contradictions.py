"""Rules for values of a run that are valid alone and invalid together, except for its parallel layout (layout.py)."""

import re
from collections.abc import Iterator
from math import sqrt

from conf.rules import (
    batch_ramp,
    objectives,
    packed_base,
    precision,
    pretraining,
    reinforcement,
    schedule,
    serving,
    shipping,
)
from conf.schema import clusters
from conf.schema.data import Rows
from conf.schema.named import OBJECTIVES
from conf.schema.run import Run, sections
from conf.schema.sections import Adapter
from conf.schema.training import Train

SMALLEST_NORM = 1e-6  # for clipping gradients: smaller ones vanish against Adam's eps
SCALES = (1e-4, 1e3)  # of an adapter's output; 0.1 to 10 are common
SHARES = ("exact_match", "acc", "acc_norm")  # last parts of metrics that are shares of rows
LINES = ("slurm.setup",)  # lists whose entries may be equal: lines of a script


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are valid alone and invalid together."""
    train, optimizer, moe = run.train, run.optimizer, run.moe
    yield from _repetitions(run)
    if run.adapter.kind != "none" and not run.adapter.targets:
        yield "adapter.targets", f"empty, but adapter.kind is {run.adapter.kind}"
    for key in ("rslora", "b_lr_ratio"):
        if run.adapter.kind == "none" and getattr(run.adapter, key) != Adapter.model_fields[key].default:
            yield f"adapter.{key}", "has no effect with adapter.kind none"
    yield from _scale(run)
    if run.model.adapter and run.adapter.kind != "lora":
        yield "model.adapter", f"can only be continued as LoRA, but adapter.kind is {run.adapter.kind}"
    if run.model.adapter and run.reinforce.steps and run.reinforce.start == "base":
        yield "model.adapter", "has no effect with reinforce.start base, which skips the training"
    if "adapter" in (run.export.formats or ()) and run.adapter.kind == "none":
        yield "export.formats", "adapter, but adapter.kind is none: no adapter is trained"
    if run.export.every is not None and run.adapter.kind == "none":
        yield "export.every", "writes adapters, but adapter.kind is none: no adapter is trained"
    if run.export.weights == "ema" and (why := _without_means(run)):
        yield "export.weights", f"ema, but {why}"
    if "adapter" in (run.export.formats or ()) and run.export.checkpoint == "base":
        yield "export.formats", "adapter, but the base has none"
    if train.steps is not None and train.epochs is not None:
        yield "train.epochs", f"{train.epochs:g}, but train.steps is {train.steps}: set only one of them"
    yield from schedule.wrong_steps(run)
    if run.data.validation + run.data.test >= 1:
        yield "data.test", f"{run.data.test} and data.validation {run.data.validation} leave nothing to train on"
    if run.data.mixture:
        for key in Rows.model_fields:
            if getattr(run.data, key) != Rows.model_fields[key].default:
                yield f"data.{key}", "has no effect with data.mixture: set it for the parts of the mixture"
    for number, part in enumerate(run.data.mixture):
        if part.source is None:
            yield f"data.mixture[{number}].source", "missing"
    if optimizer.warmup is not None and optimizer.warmup_steps:
        also = f"optimizer.warmup_steps is {optimizer.warmup_steps}"
        yield "optimizer.warmup", f"{optimizer.warmup:g}, but {also}: set only one of them"
    if optimizer.min_lr > optimizer.lr:
        yield "optimizer.min_lr", f"{optimizer.min_lr} is above optimizer.lr {optimizer.lr}"
    if 0 < optimizer.clip_grad < SMALLEST_NORM:
        text = f"{optimizer.clip_grad:g} clips gradients to almost nothing"
        yield "optimizer.clip_grad", f"{text}: at least {SMALLEST_NORM:g}, or 0 for no clipping"
    if optimizer.kind == "muon":
        yield from _muon(run)
    if train.recompute == "selective" and not train.recompute_modules:
        yield "train.recompute_modules", "empty, but train.recompute is selective"
    for key, kind in (("recompute_modules", "selective"), ("recompute_layers", "full"), ("recompute_first", "full")):
        if train.recompute != kind and getattr(train, key) != Train.model_fields[key].default:
            yield f"train.{key}", f"has no effect with train.recompute {train.recompute}"
    if train.recompute_first is not None and train.recompute_layers != 1:
        yield "train.recompute_first", "needs train.recompute_layers 1"
    if train.cuda_graphs:
        yield from _cuda_graphs(run)
    if train.overlap_tp:
        yield from _overlap_tp(run)
    if "moe_act" in train.recompute_modules and not moe.grouped_gemm:
        yield "train.recompute_modules", "moe_act needs moe.grouped_gemm"
    if moe.balance == "none" and moe.aux_loss_coeff:
        yield "moe.aux_loss_coeff", "has no effect with moe.balance none"
    if run.model.dropout and run.reinforce.steps:
        steps = f"the probabilities that reinforce.steps {run.reinforce.steps} compare"
        yield "model.dropout", f"{run.model.dropout:g} would change {steps}; 0"
    if run.log.noise_scale:
        yield from _noise_scale(run)
    if run.log.layer_norms and optimizer.offload:
        yield "log.layer_norms", f"true, but optimizer.offload {optimizer.offload:g} keeps gradients on the host"
    for rules in (precision, packed_base, pretraining, batch_ramp, objectives, serving, shipping, reinforcement):
        yield from rules.contradictions(run)
    yield from clusters.contradictions(run.gang.engine, run.kubernetes)
    yield from _names(run)
    if run.gang.min_nodes is not None and run.gang.min_nodes > run.layout.nodes:
        yield "gang.min_nodes", f"{run.gang.min_nodes} is more than layout.nodes {run.layout.nodes}"


def _names(run: Run) -> Iterator[tuple[str, str]]:
    """Rules for {name} in paths, the registered model, and its metric."""
    places = {f"paths.{key}": place for key, place in run.paths}
    for key, value in {"promote.model": run.promote.model, **places}.items():
        if set(value) & {"{", "}"}:
            yield key, f"{value}: only {{name}}, the name of the run, is allowed in braces"
    promote = run.promote
    if re.search(r"[/:'\"]|^\.+$", promote.model):
        yield "promote.model", f"{promote.model}: MLflow's registry does not allow slashes, colons or quotes in names"
    if promote.metric.endswith("/"):
        yield "promote.metric", f"{promote.metric} is a task without a metric, such as held_out/exact_match"
    if promote.margin >= 1 and promote.metric.rpartition("/")[2] in SHARES:
        yield "promote.margin", f"{promote.margin:g}, but {promote.metric} is a share: below 1"


def _scale(run: Run) -> Iterator[tuple[str, str]]:
    adapter = run.adapter
    scale = adapter.alpha / (sqrt(adapter.rank) if adapter.rslora else adapter.rank)
    if adapter.kind != "none" and not SCALES[0] <= scale <= SCALES[1]:
        text = f"{adapter.alpha} with adapter.rank {adapter.rank} scales the adapter by {scale:g}"
        yield "adapter.alpha", f"{text}: from {SCALES[0]:g} to {SCALES[1]:g} is usable; alpha = rank scales by 1"


def _without_means(run: Run) -> str:
    """Reason why the exported checkpoint has no mean of weights; empty if it has one."""
    if run.train.ema_decay is None:
        return "train.ema_decay is null: no mean is kept"
    if run.reinforce.steps:
        return f"reinforce.steps {run.reinforce.steps} keep no mean"
    return "export.checkpoint is base" if run.export.checkpoint == "base" else ""


def _muon(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why Megatron's Muon cannot train this run."""
    if run.adapter.kind != "none":
        yield "optimizer.kind", f"muon trains all weights, but adapter.kind is {run.adapter.kind}"
    if run.optimizer.distributed:
        yield "optimizer.distributed", "true, but muon needs whole matrices: false"
    if run.train.precision == "fp16":
        yield "optimizer.kind", "muon does not support train.precision fp16"
    if run.optimizer.states != "fp32":
        yield "optimizer.states", f"{run.optimizer.states}, but muon keeps its states in fp32"


def _cuda_graphs(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why layers cannot be recorded as CUDA graphs."""
    key, train = "train.cuda_graphs", run.train
    if train.precision != "bf16":
        yield key, f"true, but train.precision is {train.precision}: megatron-core records only layers of bf16"
    if train.recompute == "full":
        yield key, "true, but train.recompute full repeats a layer outside of its graph; selective, or none"
    if not objectives.of(run).one_shape or run.reinforce.steps:
        yield key, f"true, but only batches of train.objective {_one_shape()} all have the same shape"
    if train.batch_ramp and run.layout.pp > 1:
        yield key, "true, but with layout.pp above 1 train.batch_ramp changes the number of active microbatches"


def _one_shape() -> str:
    """Objectives whose batches all have the same shape."""
    return ", ".join(name for name in OBJECTIVES if objectives.named(name).one_shape)


def _overlap_tp(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why Transformer Engine cannot overlap communication with fixed buffers."""
    key, layout = "train.overlap_tp", run.layout
    if run.adapter.kind != "none":
        yield key, f"true, but adapter.kind {run.adapter.kind} needs activations that are not gathered: none"
    if run.data.packed or not objectives.of(run).one_shape:
        yield key, f"true, but data.packed and objectives other than {_one_shape()} have rows of more than one shape"
    if layout.auto:
        yield key, "true, but layout auto may choose tp 1: set the layout explicitly"
    elif layout.tp == 1 or not layout.sp:
        sp = str(layout.sp).lower()
        yield key, f"true, but layout.tp is {layout.tp} and layout.sp {sp}: tp must be above 1, and sp true"
    elif layout.tp > layout.gpus_per_node:
        yield key, f"true, but layout.tp {layout.tp} is more than the {layout.gpus_per_node} GPUs of a host"


def _noise_scale(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why the gradient of one micro batch cannot be compared with that of a batch."""
    layout = run.layout
    for key in ("pp", "cp", "ep"):
        if getattr(layout, key) > 1:
            yield "log.noise_scale", f"needs layout.{key} 1, but it is {getattr(layout, key)}"
    if not objectives.of(run).one_shape:
        yield "log.noise_scale", f"does not support train.objective {run.train.objective}"
    if run.train.precision == "fp16":
        yield "log.noise_scale", "does not support train.precision fp16, which scales gradients"
    if not layout.auto and run.train.global_batch * layout.tp < 2 * run.train.micro_batch * layout.world:
        yield "log.noise_scale", "needs at least two micro batches per step and rank"


def _repetitions(run: Run) -> Iterator[tuple[str, str]]:
    """Find repeated entries of lists, which have no meaning."""
    for section in sections():
        for key, values in getattr(run, section):
            listed = values if isinstance(values, tuple) and f"{section}.{key}" not in LINES else ()
            if repeated := {str(value) for value in listed if listed.count(value) > 1}:
                yield f"{section}.{key}", f"{min(repeated)} occurs twice"
