"""Keys of Megatron-Bridge recipes and NeMo 2 scripts, also with NeMo-Run: Python files, and commands with overrides.

Both set attributes, such as cfg.train.train_iters or recipe.trainer.max_steps, or pass keyword arguments to classes.
"""

import re
from collections.abc import Mapping
from typing import Any

from flows.adopt import python_calls
from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, Source, Stack, Target, marks, refuse, underscored
from flows.adopt.stacks import launchers
from flows.adopt.stacks import transformers as hf
from flows.adopt.stacks.megatron_lm import DEGREES, TRANSFORMER, UNTIL_THE_END

SECTIONS = {
    "TrainingConfig": "train",
    "OptimizerConfig": "optimizer",
    "SchedulerConfig": "scheduler",
    "CheckpointConfig": "checkpoint",
    "LoggerConfig": "logger",
    "ValidationConfig": "validation",
    "DistributedDataParallelConfig": "ddp",
    "TokenizerConfig": "tokenizer",
    "RNGConfig": "rng",
    "LoRA": "peft",
    "DoRA": "peft",
    "CommOverlapConfig": "comm_overlap",
    "distributed_fused_adam_with_cosine_annealing": "optimizer",
}
CONFIG = re.compile(r"^(?:cfg|config|conf|recipe|self\.cfg|pretrain|finetune)\.(?=\w)")
NEMO = {
    "trainer.strategy.": "model.",
    "strategy.": "model.",
    "peft_cfg.": "peft.",
    "MegatronStrategy.": "model.",
    "model.config.": "model.",
    "Trainer.": "trainer.",
    "optim.config.": "optimizer.",
    "optim.lr_scheduler.": "scheduler.",
    "CosineAnnealingScheduler.": "scheduler.",
}


def _spelled(key: str) -> str:
    key = CONFIG.sub("", key)
    for theirs, ours in NEMO.items():
        if key.startswith(theirs):
            key = ours + key.removeprefix(theirs)
    name, dot, rest = key.partition(".")
    return f"{SECTIONS[name]}.{rest}" if dot and name in SECTIONS else key if dot else underscored(key)


def _precision(value: Any) -> Any:
    text = str(value).lower()
    return (
        "bf16" if "bf16" in text else "fp16" if "fp16" in text else refuse("train.precision is bf16, fp16 or fp32")(0)
    )


MODEL: Mapping[str, Target] = {f"model.{name}": target for name, target in {**DEGREES, **TRANSFORMER}.items()}
TRAIN: Mapping[str, Target] = {
    "train.train_iters": "steps",
    "train.global_batch_size": "train.global_batch",
    "train.micro_batch_size": "micro",
    "train.eval_interval": "eval_steps",
    "train.eval_iters": "train.validate_batches",
    "validation.eval_interval": "eval_steps",
    "validation.eval_iters": "train.validate_batches",
    "optimizer.lr": "optimizer.lr",
    "optimizer.max_lr": "optimizer.lr",
    "optimizer.min_lr": "optimizer.min_lr",
    "scheduler.max_lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.adam_beta1": "optimizer.beta1",
    "optimizer.adam_beta2": "optimizer.beta2",
    "optimizer.adam_eps": "optimizer.eps",
    "optimizer.clip_grad": "optimizer.clip_grad",
    "optimizer.use_distributed_optimizer": "optimizer.distributed",
    "optimizer.lr_warmup_iters": "warmup_steps",
    "optimizer.start_weight_decay": "optimizer.weight_decay",
    "optimizer.end_weight_decay": "optimizer.weight_decay",
    "scheduler.lr_warmup_iters": "warmup_steps",
    "scheduler.warmup_steps": "warmup_steps",
    "scheduler.lr_warmup_fraction": "warmup_ratio",
    "scheduler.lr_decay_style": "scheduler",
    "scheduler.min_lr": "optimizer.min_lr",
    "scheduler.lr_decay_iters": UNTIL_THE_END,
    "optimizer.lr_decay_iters": UNTIL_THE_END,
    "checkpoint.save_interval": "save_steps",
    "checkpoint.async_save": "checkpoint.background",
    "peft.dim": ("adapter.rank", lambda value: {"kind": "lora", "adapter.rank": value}),
    "peft.alpha": ("adapter.alpha", lambda value: {"kind": "lora", "adapter.alpha": value}),
    "peft.dropout": "adapter.dropout",
    "peft.target_modules": ("adapter.targets", lambda value: {"kind": "lora", "targets": value}),
    "peft.share_expert_adapters": ("adapter.experts", lambda value: "shared" if is_on(value) else "each"),
    "peft.lora_A_init_method": "adapter.init",
    "rng.seed": "train.seed",
    "dataset.seed": "data.seed",
    "dataset.seq_length": "data.seq_length",
    "dataset.sequence_length": "data.seq_length",
    "dataset.num_workers": "data.workers",
    "dataset.enable_offline_packing": "data.packed",
    "dataset.dataset_name": "datasets",
    "dataset.path_or_dataset_name": "datasets",
    "model.seq_length": "data.seq_length",
    "model.virtual_pipeline_model_parallel_size": "layout.vpp",
    "mixed_precision": ("train.precision", _precision),
    "AutoBridge.from_hf_pretrained.0": "model.source",
    "AutoBridge.from_pretrained.0": "model.source",
    "default_peft_config.0": "kind",
    python_calls.IN_NAME: "gpus",
}
NEMO_KEYS: Mapping[str, Target] = {
    "trainer.max_steps": "steps",
    "trainer.max_epochs": "epochs",
    "trainer.devices": "gpus",
    "trainer.num_nodes": "nodes",
    "trainer.accumulate_grad_batches": ("train.global_batch", lambda value: {}),
    "trainer.val_check_interval": "eval_steps",
    "trainer.limit_val_batches": "train.validate_batches",
    "trainer.gradient_clip_val": "optimizer.clip_grad",
    "data.global_batch_size": "train.global_batch",
    "data.micro_batch_size": "micro",
    "data.seq_length": "data.seq_length",
    "data.dataset_root": "datasets",
    "finetune_recipe.seq_length": "data.seq_length",
    "finetune_recipe.packed_sequence": "data.packed",
    "resume.restore_config.path": ("model.source", lambda value: str(value).removeprefix("nemo://")),
    "finetune_recipe.num_nodes": "nodes",
    "finetune_recipe.num_gpus_per_node": "gpus",
    "finetune_recipe.peft_scheme": "kind",
    "pretrain_recipe.num_nodes": "nodes",
    "pretrain_recipe.num_gpus_per_node": "gpus",
    "default_finetune_recipe.1": "model.source",
}
LEFT_OUT = {
    **launchers.LEFT_OUT,
    "env_vars": hf.SPEED,
    "to_megatron_provider.load_weights": "the weights of the release are loaded",
    "default_finetune_recipe.*": hf.PATHS,
    "isinstance.*": hf.LOGS,
    "dataset.offline_packing_specs.*": "a packed sequence has data.seq_length tokens",
    "PackedSequenceSpecs.*": "a packed sequence has data.seq_length tokens",
    "recipe": "the keys of the file count; values that only the recipe sets are not read",
    "logger.*": hf.LOGS,
    "log.*": hf.LOGS,
    "train.manual_gc*": hf.SPEED,
    "train.exit_*": "a stopped training resumes from its last checkpoint",
    "train.empty_unused_memory_level": hf.SPEED,
    "checkpoint.save": hf.PATHS,
    "checkpoint.load": hf.PATHS,
    "checkpoint.pretrained_checkpoint": hf.PATHS,
    "checkpoint.ckpt_format": "checkpoints are torch_dist",
    "checkpoint.fully_parallel_*": "checkpoints are written by all ranks",
    "checkpoint.dist_ckpt_*": "checkpoints are torch_dist",
    "ddp.*": hf.SPEED,
    "comm_overlap*": hf.SPEED,
    "model.*_fusion": hf.SPEED,
    "model.transformer_impl": hf.SPEED,
    "model.attention_backend": hf.SPEED,
    "model.cuda_graph*": hf.SPEED,
    "model.pipeline_dtype": "train.precision",
    "model.fine_grained_activation_offloading": hf.SPEED,
    "model.offload_modules": hf.SPEED,
    "model.cross_entropy_*": hf.SPEED,
    "model.moe_shared_expert_overlap": hf.SPEED,
    "model.moe_flex_dispatcher_backend": hf.SPEED,
    "model.moe_router_padding_for_*": hf.SPEED,
    "model.moe_router_force_load_balancing": "moe.force_balance is for measurements only",
    "model.moe_hybridep_num_sms": hf.SPEED,
    "model.gradient_as_bucket_view": hf.SPEED,
    "model.ckpt_*": hf.SPEED,
    "model.recompute_method": "uniform blocks of train.recompute_layers",
    "model.calculate_per_token_loss": "the loss is a mean over learned tokens",
    "optimizer.use_precision_aware_optimizer": "optimizer.states and optimizer.gradients set the precision",
    "optimizer.*_dtype": "optimizer.states and optimizer.gradients set the precision",
    "trainer.accelerator": "hardware.gpu names the device",
    "trainer.log_every_n_steps": hf.LOGS,
    "trainer.limit_test_batches": "the flow evaluates",
    "trainer.use_distributed_sampler": hf.SPEED,
    "trainer.callbacks": hf.LOGS,
    "*GarbageCollectionCallback.*": hf.SPEED,
    "MegatronCommOverlapCallback.*": hf.SPEED,
    "finetune_recipe.name": hf.LOGS,
    "finetune_recipe.dir": hf.PATHS,
    "pretrain_recipe.name": hf.LOGS,
    "pretrain_recipe.dir": hf.PATHS,
    "tokenizer.*": "the tokenizer is the model's",
}
DEFAULTS: Mapping[str, Any] = {
    "kind": "none",
    "adapter.rank": 32,
    "adapter.alpha": 32,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta2": 0.95,
    "scheduler": "cosine",
    "tp_default": True,
    "data.validation": 0.05,
}
DIFFERENCES = (
    "values that a recipe takes from another function are not in the file: compare with the printed configuration",
    "adapter.experts: each expert has its adapter here; share_expert_adapters of Megatron-Bridge is shared",
    HELD_OUT,
)


def _is_bridge(source: Source) -> int:
    if source.kind == "python":
        imports = any(name.startswith("megatron.bridge") for name in source.words)
        return 10 + _known(source) if imports and _known(source) > 2 else 0
    known = marks(source, "train.train_iters", "train.global_batch_size", "model.tensor_model_parallel_size")
    return 30 if known > 1 else 0


def _known(source: Source) -> int:
    return sum(_spelled(key) in {**MODEL, **TRAIN, **NEMO_KEYS} for key in source.keys)


def _is_nemo(source: Source) -> int:
    imports = any(name.startswith(("nemo.", "nemo_run")) or name == "nemo_run" for name in source.words)
    return 10 + _known(source) if imports and _known(source) > 2 else 0


MEGATRON_BRIDGE = Stack(
    name="megatron-bridge",
    title="Megatron-Bridge",
    kinds=("python", "command"),
    recognises=_is_bridge,
    spelled=_spelled,
    keys={**launchers.KEYS, **MODEL, **TRAIN},
    left_out=LEFT_OUT,
    defaults=DEFAULTS,
    differences=DIFFERENCES,
)
NEMO_2 = Stack(
    name="nemo",
    title="NeMo 2 and NeMo-Run",
    kinds=("python",),
    recognises=_is_nemo,
    spelled=_spelled,
    keys={**MODEL, **TRAIN, **NEMO_KEYS},
    left_out=LEFT_OUT,
    defaults=DEFAULTS,
    differences=DIFFERENCES,
)
