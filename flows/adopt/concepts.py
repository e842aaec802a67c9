"""Concepts that several stacks share and that are not one key here, such as gradient accumulation.

settle(values) replaces concepts by our keys, and lists the differences in meaning. CONCEPTS names the keys that follow
from each concept.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from flows.adopt.stack import NoCounterpartError

CONCEPTS = {
    "micro": "train.micro_batch, train.global_batch",
    "accumulation": "train.global_batch",
    "gpus": "layout.gpus_per_node",
    "nodes": "layout.nodes",
    "scheduler": "optimizer.decay",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup",
    "min_lr_ratio": "optimizer.min_lr",
    "targets": "adapter.targets",
    "kind": "adapter.kind",
    "dora": "adapter.kind",
    "bits": "model.base",
    "four_bits": "model.base",
    "eight_bits": "model.base",
    "method": "train.objective",
    "precision": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "recompute": "train.recompute",
    "epochs": "train.epochs",
    "steps": "train.steps",
    "save_strategy": "checkpoint.save_every",
    "save_steps": "checkpoint.save_every",
    "saves_per_epoch": "checkpoint.save_every",
    "eval_strategy": "train.validate_every",
    "eval_steps": "train.validate_every",
    "evals_per_epoch": "train.validate_every",
    "validation": "data.validation",
    "datasets": "data.source, data.mixture",
    "prompts_in_loss": "data.loss_on",
    "answers_only": "data.loss_on",
    "optimizer": "optimizer.kind",
    "tp_default": "layout.etp",
    "prompt_tokens": "data.seq_length",
    "mlp_targets": "adapter.targets",
}
# Names of modules in transformers, with those of Megatron.
TARGETS = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "linear_qkv", "c_attn"), "linear_qkv"
    ),
    **dict.fromkeys(("o_proj", "output_proj", "dense", "linear_proj"), "linear_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "linear_fc1"), "linear_fc1"),
    **dict.fromkeys(("down_proj", "w2", "linear_fc2"), "linear_fc2"),
    **{name: f"linear_{name}" for name in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")},
    **{f"linear_{name}": f"linear_{name}" for name in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")},
    **{"q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj"},
    **{"kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj"},
    **{"in_proj": "in_proj", "out_proj": "out_proj", "linear_q_proj": "linear_q_proj"},
}
TOGETHER = {"linear_qkv": {"q_proj", "k_proj", "v_proj"}, "linear_fc1": {"gate_proj", "up_proj"}}
DECAYS = {
    **{"cosine": "cosine", "cosine_with_min_lr": "cosine", "cosineannealing": "cosine", "linear": "linear"},
    **{"constant": "constant", "constant_with_warmup": "constant"},
}
METHODS = {"sft": "sft", "pt": "sft", "pretrain": "sft", "pretraining": "sft", "dpo": "dpo"}
FALSE = {False, None, "false", "False", "no", "off", "none", "null", "", "0"}
UNIT = "a step here has train.global_batch sequences over all ranks"


@dataclass
class Settled:
    """Our keys, and what a reader must know about them."""

    values: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)  # targets that have no counterpart, with the reason


def is_on(value: Any) -> bool:
    return bool(value) if isinstance(value, list | dict) else value not in FALSE


def number(value: Any) -> float | int:
    """Return a number. Texts such as 1e-4 are numbers too."""
    if isinstance(value, bool) or value is None:
        raise NoCounterpartError(f"{value} is not a number")
    if isinstance(value, int | float):
        return value
    try:
        return int(str(value).replace("_", ""))
    except ValueError:
        pass
    try:
        return float(str(value))
    except ValueError:
        raise NoCounterpartError(f"{value} is not a number; set the key here") from None


def whole(value: Any) -> int:
    value = number(value)
    if not isfinite(value) or value != int(value):
        raise NoCounterpartError(f"{value} is not an integer")
    return int(value)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value or "$" in value:
        raise NoCounterpartError(f"{value}: not a known text; set the key here")
    return value


def words(value: Any) -> list[str]:
    """Return a list of texts: a list, or names separated by commas or blanks."""
    if isinstance(value, str):
        value = re.split(r"[,\s]+", value.strip("[]() "))
    if not isinstance(value, list | tuple):
        raise NoCounterpartError(f"{value} is not a list")
    return [str(word).strip("'\" ") for word in value if str(word).strip("'\" ")]


def targets(value: Any, settled: Settled) -> dict[str, Any]:
    if isinstance(value, str) and any(letter in value for letter in "*|()^\\"):
        raise NoCounterpartError("a regular expression; list the layers in adapter.targets")
    names = [name.rpartition(".")[2] for name in words(value)]
    if any(name in ("all-linear", "all", "all_linear") for name in names):
        settled.differences.append("adapter.targets: all-linear here includes all experts of a layer")
        return {"adapter.targets": "all-linear"}
    known = [TARGETS[name] for name in names if name in TARGETS]
    for name in sorted({*names} - {*TARGETS}):
        settled.differences.append(f"adapter.targets: {name} has no counterpart and gets no adapter")
    if not known:
        raise NoCounterpartError("none of these layers has a counterpart")
    for ours, theirs in TOGETHER.items():
        if ours in known and ours not in names and (lacks := theirs - {*names}) and theirs & {*names}:
            settled.differences.append(f"adapter.targets: {ours} also adapts {', '.join(sorted(lacks))}")
    if {"linear_qkv", "linear_fc1"} & {*known}:
        settled.differences.append(
            "adapter.targets: q, k and v are one layer here, linear_qkv, with one A; gate and up are linear_fc1"
        )
    return {"adapter.targets": list(dict.fromkeys(known))}


def scheduler(value: Any, _: Settled) -> dict[str, Any]:
    name = str(value).rpartition(".")[2].lower()
    if name not in DECAYS:
        raise NoCounterpartError(f"optimizer.decay is {', '.join(sorted({*DECAYS.values()}))}")
    return {"optimizer.decay": DECAYS[name]}


def method(value: Any, settled: Settled) -> dict[str, Any]:
    name = str(value).lower()
    if name not in METHODS:
        raise NoCounterpartError("the objectives here are sft, dpo and distill; for GRPO see reinforce.steps")
    if METHODS[name] == "dpo":
        settled.differences.append("train.global_batch: with dpo, a row has two sequences here too")
    return {"train.objective": METHODS[name]} if METHODS[name] != "sft" else {}


def kind(value: Any, settled: Settled) -> dict[str, Any]:
    name = str(value).lower() if value is not None else "none"
    if name in ("lora", "qlora", "dora"):
        if name == "qlora":
            settled.differences.append("model.base: NF4 has no counterpart; nvfp4 has 4 bits and other values")
        return {"adapter.kind": name.replace("qlora", "lora")} | ({"model.base": "nvfp4"} if name == "qlora" else {})
    if name in ("full", "none", "null", "", "false"):
        return {"adapter.kind": "none"}
    raise NoCounterpartError("adapter.kind is lora, dora or none")


def bits(value: Any, settled: Settled) -> dict[str, Any]:
    if whole(value) not in (4, 8):
        raise NoCounterpartError("a base has 4 or 8 bits")
    return four_bits(True, settled) if whole(value) == 4 else eight_bits(True, settled)


def four_bits(value: Any, settled: Settled) -> dict[str, Any]:
    if not is_on(value):
        return {}
    settled.differences.append("model.base: NF4 has no counterpart; nvfp4 has 4 bits and other values")
    return {"model.base": "nvfp4"}


def eight_bits(value: Any, settled: Settled) -> dict[str, Any]:
    if not is_on(value):
        return {}
    settled.differences.append("model.base: bitsandbytes' int8 has no counterpart; fp8 has 8 bits and other values")
    return {"model.base": "fp8"}


def optimizer(value: Any, settled: Settled) -> dict[str, Any]:
    name = str(value).lower().rpartition(".")[2]
    if name == "muon":
        return {"optimizer.kind": "muon"}
    if name in ("adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "fused_adam"):
        return {}
    if "adamw" in name or "adam_" in name:
        settled.differences.append(f"optimizer.kind: {name} has other states; adamw here keeps them in fp32")
        return {}
    raise NoCounterpartError("optimizer.kind is adamw or muon")


def precision(value: Any, _: Settled) -> dict[str, Any]:
    name = str(value).rpartition(".")[2].lower()
    for ours, theirs in {
        "bf16": ("bf16", "bfloat16"),
        "fp16": ("fp16", "float16"),
        "fp32": ("fp32", "float32"),
    }.items():
        if any(name.startswith(one) for one in theirs):
            return {"train.precision": ours}
    if name in ("auto", "none"):
        return {}
    raise NoCounterpartError("train.precision is bf16, fp16 or fp32")


def recompute(value: Any, settled: Settled) -> dict[str, Any]:
    if value == "selective":
        settled.differences.append("train.recompute: selective; Megatron's default module is core_attn")
        return {"train.recompute": "selective", "train.recompute_modules": ["core_attn"]}
    return {"train.recompute": "full"} if is_on(value) else {}


def optional_flag(ours: str) -> Callable[[Any, Settled], dict[str, Any]]:
    return lambda value, _: {"train.precision": ours} if is_on(value) else {}


def interval(key: str, never: int | None) -> Callable[[Any, Settled], dict[str, Any]]:
    """Read a number of steps, a share of all steps, or one of transformers' words for them."""

    def read(value: Any, _: Settled) -> dict[str, Any]:
        if value in ("epoch", "steps"):
            return {key: "epoch"} if value == "epoch" else {}
        if value in ("no", False, None):
            return {} if never is None else {key: never}
        value = number(value)
        return {key: value if 0 < value < 1 else whole(value)} if value > 0 else {} if never is None else {key: never}

    return read


def per_epoch(key: str) -> Callable[[Any, Settled], dict[str, Any]]:
    def read(value: Any, settled: Settled) -> dict[str, Any]:
        count = number(value)
        if count <= 0:
            return {}
        if count != 1:
            settled.differences.append(f"{key}: {count} times in an epoch there, once here")
        return {key: "epoch"}

    return read


def datasets(value: Any, _: Settled) -> dict[str, Any]:
    names = [name for name in value if name] if isinstance(value, list) else [value]
    names = [text(name) for name in names]
    if not names:
        raise NoCounterpartError("no data set")
    return {"data.source": names[0]} if len(names) == 1 else {"data.mixture": [{"source": name} for name in names]}


def validation(value: Any, settled: Settled) -> dict[str, Any]:
    share = number(value)
    if share >= 1:
        raise NoCounterpartError("a number of rows; data.validation is a share")
    settled.differences.append("data.validation: the split is made by the rows' content, so other rows are in it")
    return {"data.validation": float(share)}


HANDLERS: dict[str, Callable[[Any, Settled], dict[str, Any]]] = {
    "scheduler": scheduler,
    "targets": targets,
    "kind": kind,
    "dora": lambda value, _: {"adapter.kind": "dora"} if is_on(value) else {},  # after the kind, which it changes
    "bits": bits,
    "four_bits": four_bits,
    "eight_bits": eight_bits,
    "method": method,
    "precision": precision,
    "bf16": optional_flag("bf16"),
    "fp16": optional_flag("fp16"),
    "recompute": recompute,
    "optimizer": optimizer,
    "datasets": datasets,
    "validation": validation,
    "save_strategy": interval("checkpoint.save_every", None),
    "save_steps": interval("checkpoint.save_every", None),
    "saves_per_epoch": per_epoch("checkpoint.save_every"),
    "eval_strategy": interval("train.validate_every", 0),
    "eval_steps": interval("train.validate_every", 0),
    "evals_per_epoch": per_epoch("train.validate_every"),
    "prompts_in_loss": lambda value, _: {"data.loss_on": "all"} if is_on(value) else {},
    "answers_only": lambda value, _: {} if is_on(value) else {"data.loss_on": "all"},
    "tp_default": lambda value, _: {},
}


def settle(given: dict[str, Any], gpus: int | None = None) -> Settled:
    """Return our keys for keys and concepts. `gpus` is the number of GPUs of a host if the file does not name it."""
    settled = Settled()
    if "mlp_targets" in given and isinstance(given.get("targets"), list):
        given = given | {"targets": [*given["targets"], *given["mlp_targets"]]}
    for target, value in given.items():
        if "." in target:
            settled.values[target] = value
    for target, handler in HANDLERS.items():
        if target in given:
            try:
                settled.values |= handler(given[target], settled)
            except NoCounterpartError as error:
                settled.unfit[target] = str(error)
    _layout(given, settled, gpus)
    _batch(given, settled)
    _length(given, settled)
    _adapter(settled)
    return settled


def _layout(given: dict[str, Any], settled: Settled, gpus: int | None) -> None:
    values = settled.values
    grid = {name: values.get(f"layout.{name}", 1) for name in ("tp", "pp", "cp", "ep", "etp")}
    if "tp_default" in given and "layout.etp" not in values and grid["ep"] > 1 and grid["tp"] > 1:
        grid["etp"] = values["layout.etp"] = grid["tp"]
        settled.differences.append("layout.etp: not set there, and Megatron then takes tp; the default here is 1")
    each, nodes = given.get("gpus") or gpus, given.get("nodes") or 1
    fewest = max(grid["tp"] * grid["pp"] * grid["cp"], grid["etp"] * grid["ep"] * grid["pp"])
    if not each:
        each = fewest
        settled.differences.append(f"layout: the file does not name its GPUs, here {fewest}; --gpus N sets them")
    if each > 8 and nodes == 1 and each % 8 == 0:
        nodes, each = each // 8, 8
    values["layout.gpus_per_node"] = each
    if nodes > 1:
        values["layout.nodes"] = nodes
    if prod(grid.values()) == 1:
        values["layout.auto"] = True
        settled.differences.append(
            "layout.auto: the planner chooses the layout; FSDP and DeepSpeed have no counterpart"
        )


def _batch(given: dict[str, Any], settled: Settled) -> None:
    values = settled.values
    micro, accumulation = given.get("micro"), given.get("accumulation", 1)
    if micro:
        values.setdefault("train.micro_batch", micro)
    if "train.global_batch" in values or not micro:
        if "accumulation" in given:
            settled.differences.append(f"train.global_batch: {UNIT}; accumulation follows from it")
        return
    world = values["layout.gpus_per_node"] * values.get("layout.nodes", 1)
    ranks = max(1, world // prod(values.get(f"layout.{name}", 1) for name in ("tp", "pp", "cp")))
    values["train.global_batch"] = micro * accumulation * ranks
    settled.differences.append(
        f"train.global_batch: micro {micro} x accumulation {accumulation} x {ranks} data-parallel ranks = "
        f"{micro * accumulation * ranks}; it stays the same here on other GPUs"
    )
    if values.get("layout.auto"):
        values.pop("train.micro_batch", None)


def _length(given: dict[str, Any], settled: Settled) -> None:
    values = settled.values
    if "prompt_tokens" in given and "reinforce.max_tokens" in values:
        values["data.seq_length"] = given["prompt_tokens"] + values["reinforce.max_tokens"]
    steps, epochs = given.get("steps"), given.get("epochs")
    if steps is not None and steps > 0:
        values["train.steps"] = steps
        if epochs is not None:
            settled.differences.append("train.steps: the steps count there too; the epochs are ignored")
    elif epochs is not None:
        values["train.epochs"] = epochs
        settled.differences.append("train.epochs: an epoch is one pass over the training sequences, after packing")
    warmup, ratio = given.get("warmup_steps"), given.get("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, ratio = None, warmup
    if warmup:
        values["optimizer.warmup_steps"] = warmup
        if ratio:
            settled.differences.append("optimizer.warmup_steps: the steps count there too; the ratio is ignored")
    elif ratio:
        values["optimizer.warmup"] = ratio
        settled.differences.append("optimizer.warmup: a share of all steps, as there")
    if given.get("min_lr_ratio") and "optimizer.lr" in values:
        values["optimizer.min_lr"] = float(f"{values['optimizer.lr'] * given['min_lr_ratio']:.6g}")


def _adapter(settled: Settled) -> None:
    values = settled.values
    if values.get("adapter.kind") == "none":
        for key in [key for key in values if key.startswith("adapter.") and key != "adapter.kind"]:
            del values[key]
            settled.unfit |= dict.fromkeys(
                (key, "targets", "mlp_targets"), "adapter.kind is none: no adapter is trained"
            )
        if values.pop("model.base", None):
            settled.differences.append(
                "model.base: only LoRA has a frozen base in 4 or 8 bits; all weights are trained"
            )
        return
    rank, alpha = values.get("adapter.rank"), values.get("adapter.alpha")
    if rank and alpha:
        by, root = ("sqrt(rank)", rank**0.5) if values.get("adapter.rslora") else ("rank", rank)
        settled.differences.append(
            f"adapter.alpha: the adapter is scaled by alpha / {by} = {alpha / root:.4g}, as there"
        )
    if values.get("adapter.init") == "kaiming":
        settled.differences.append("adapter.init: kaiming, as in PEFT; Megatron-Bridge's and our default is xavier")
    if values.get("data.packed"):
        settled.differences.append("data.packed: rows in a sequence do not see each other; a step has more rows")
