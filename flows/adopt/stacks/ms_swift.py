"""Keys of ms-swift: swift and megatron commands, scripts with them, and files of arguments."""

import re
from typing import Any

from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, NoCounterpartError, Source, Stack, marks, underscored
from flows.adopt.stacks import transformers as hf
from flows.adopt.stacks.megatron_lm import DEGREES, MOE

VERB = re.compile(r"(?:^|/| )(?:swift|megatron) (?:sft|pt|rlhf)\b|swift/cli/(?:_megatron/)?(?:sft|pt|rlhf)\.py")
MEGATRON = re.compile(r"(?:^|/| )megatron (?:sft|pt|rlhf)\b|/_megatron/")
NAMES = ("tuner_type", "train_type", "lora_rank", "split_dataset_ratio", "max_length", "model", "dataset")
OF_MEGATRON = ("tensor_model_parallel_size", "expert_model_parallel_size", "micro_batch_size", "train_iters")


def _recognises(source: Source) -> int:
    if source.kind == "command":
        return 20 if VERB.search(" ".join(source.words)) else 0
    known = marks(source, *NAMES)
    return known * 2 if known > 3 else 0


def _defaults(source: Source) -> dict[str, Any]:
    """Return what differs if all weights are trained, and in Megatron-SWIFT, which trains all by default."""
    keys = {underscored(key): value for key, value in source.keys.items()}
    megatron = MEGATRON.search(" ".join(source.words)) or any(key in keys for key in OF_MEGATRON)
    kinds = (str(keys[key]) for key in ("tuner_type", "train_type", "sft_type") if key in keys)
    is_full = next(kinds, "full" if megatron else "lora") == "full"
    found = {"kind": "full", "optimizer.lr": 1e-5} if is_full else {}
    return found | ({"train.global_batch": 16} if megatron else {})


def _datasets(value: Any) -> dict[str, Any]:
    """Read names such as AI-ModelScope/alpaca-gpt4-data-en#500: the number is data.rows."""
    listed = value if isinstance(value, list) else str(value).split()
    names = [re.sub(r"^(?:HF|MS)::", "", str(name)) for name in listed]
    if len(names) == 1 and (match := re.fullmatch(r"([^#:]+(?:://[^#:]+)?)(?::[\w,/-]+)?#(\d+)", names[0])):
        return {"datasets": [match[1]], "data.rows": int(match[2])}
    note = "data.mixture: the numbers of rows (#N) are not read; weights and data.rows limit rows here"
    datasets = [re.split(r"#|:(?!//)", name)[0] for name in names]
    return {"datasets": datasets, "note": note if "#" in str(names) else None}


def _ratio(value: Any) -> dict[str, Any]:
    return {"validation": value} if float(value) else {"data.validation": 0.0}


def _layers(value: Any) -> dict[str, Any]:
    if value in ("none", None):
        return {}
    return {"recompute": value}


def _loss_scale(value: Any) -> str:
    names = {"default": "assistant", "last_round": "answer", "all": "all"}
    if value not in names:
        raise NoCounterpartError("weights of tokens; data.loss_on counts or skips them")
    return names[value]


MS_SWIFT = Stack(
    name="ms-swift",
    title="ms-swift",
    kinds=("command", "yaml"),
    recognises=_recognises,
    spelled=underscored,
    keys={
        **hf.KEYS,
        "model": "model.source",
        "model_id_or_path": "model.source",
        "model_revision": "model.revision",
        "dataset": ("data.source, data.mixture, data.rows", _datasets),
        "split_dataset_ratio": ("data.validation", _ratio),
        "tuner_type": "kind",
        "train_type": "kind",
        "sft_type": "kind",
        "lora_rank": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "use_rslora": "adapter.rslora",
        "use_dora": "dora",
        "lorap_lr_ratio": "adapter.b_lr_ratio",
        "target_modules": "targets",
        "adapters": "model.adapter",
        "mcore_adapter": "model.adapter",
        "quant_bits": "bits",
        "torch_dtype": "precision",
        "max_length": "data.seq_length",
        "truncation_strategy": (
            "data.too_long",
            lambda value: {"delete": "drop", "right": "truncate", "left": "truncate", "raise": "error"}.get(value),
        ),
        "packing": "data.packed",
        "loss_scale": ("data.loss_on", _loss_scale),
        "rlhf_type": "method",
        "beta": "train.dpo_beta",
        "label_smoothing": "train.dpo_label_smoothing",
        "micro_batch_size": "micro",
        "global_batch_size": "train.global_batch",
        "lr": "optimizer.lr",
        "min_lr": "optimizer.min_lr",
        "lr_warmup_fraction": "warmup_ratio",
        "lr_warmup_iters": "warmup_steps",
        "lr_decay_style": "scheduler",
        "clip_grad": "optimizer.clip_grad",
        "adam_eps": "optimizer.eps",
        "max_epochs": "epochs",
        "train_iters": "steps",
        "save_interval": "save_steps",
        "eval_interval": "eval_steps",
        "eval_iters": "train.validate_batches",
        "optimizer": "optimizer",
        "optimizer_cpu_offload": ("optimizer.offload", lambda value: 1.0 if is_on(value) else None),
        "optimizer_offload_fraction": "optimizer.offload",
        **DEGREES,
        **MOE,
        "decoder_first_pipeline_num_layers": "layout.first_stage_layers",
        "decoder_last_pipeline_num_layers": "layout.last_stage_layers",
        "recompute_granularity": ("train.recompute", _layers),
        "recompute_num_layers": "train.recompute_layers",
        "recompute_modules": "train.recompute_modules",
        "moe_router_dtype": "moe.router_dtype",
        "no_save_optim": ("checkpoint.save_optimizer", lambda value: not is_on(value)),
        "async_save": "checkpoint.background",
        "nproc_per_node": "gpus",
        "nnodes": "nodes",
    },
    left_out={
        **hf.LEFT_OUT,
        "load_from_cache_file": hf.DATA,
        "lazy_tokenize": hf.DATA,
        "streaming": hf.DATA,
        "packing_num_proc": hf.DATA,
        "padding_free": "data.packed avoids padding",
        "save": hf.PATHS,
        "load": hf.PATHS,
        "model_author": hf.LOGS,
        "model_name": hf.LOGS,
        "add_version": hf.PATHS,
        "use_hf": "models and data sets come from the Hugging Face Hub",
        "save_full_model": "export.formats names the exported formats",
        "merge_lora": "export.formats names the exported formats",
        "finetune": "a new training starts at step 0; a stopped one resumes",
        "no_save_rng": "the state of the random numbers is always saved",
        "attention_backend": hf.SPEED,
        "cross_entropy_loss_fusion": hf.SPEED,
        "cross_entropy_fusion_impl": hf.SPEED,
        "moe_permute_fusion": hf.SPEED,
        "moe_shared_expert_overlap": hf.SPEED,
        "moe_expert_capacity_factor": "experts drop no tokens here",
        "recompute_method": "uniform blocks of train.recompute_layers",
        "use_distributed_optimizer": "on by default here",
        "overlap_*": hf.SPEED,
        "use_precision_aware_optimizer": "optimizer.states and optimizer.gradients set the precision",
        "use_flash_ckpt": hf.SPEED,
        "model_type": "the family is read from config.json",
        "template": "data.template: auto uses the tokenizer's chat template",
        "system": "a system prompt is a column, data.system",
        "master_*": hf.SPEED,
        "node_rank": hf.SPEED,
        "use_hf_hub": "models and data sets come from the Hugging Face Hub",
        "sequence_parallel_size": hf.SHARDS,
        "load_args": hf.PATHS,
    },
    defaults={
        "kind": "lora",
        "adapter.rank": 8,
        "adapter.alpha": 32,
        "adapter.dropout": 0.05,
        "adapter.init": "kaiming",
        "targets": "all-linear",
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.1,
        "optimizer.beta2": 0.95,
        "scheduler": "cosine",
        "epochs": 3,
        "micro": 1,
        "accumulation": 1,
        "save_steps": 500,
        "train.seed": 42,
        "data.validation": 0.0,
    },
    defaults_of=_defaults,
    differences=(
        "adapter.kind: megatron commands train all weights by default, swift commands a LoRA",
        "layout.etp: 1 in ms-swift and here",
        HELD_OUT,
    ),
)
