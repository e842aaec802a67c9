"""Keys of Oumi: its YAML files for training."""

from typing import Any

from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, Source, Stack, marks, refuse, unnumbered
from flows.adopt.stacks import transformers as hf


def _recognises(source: Source) -> int:
    known = marks(source, "model.model_name", "training.trainer_type", "data.train.datasets[0].dataset_name")
    return 10 * known if known > 1 else 0


def _trainer(value: Any) -> dict[str, Any]:
    name = str(value).rpartition("_")[2].lower()
    return {"method": "sft" if name in ("sft", "oumi") else name}


TRAINING = {
    **{
        key: target for key, target in hf.KEYS.items() if key not in ("optim", "gradient_checkpointing", "bf16", "fp16")
    },
    "optimizer": "optimizer",
    "enable_gradient_checkpointing": "recompute",
    "trainer_type": ("train.objective", _trainer),
    "use_peft": ("adapter.kind", lambda value: {"kind": "lora" if is_on(value) else "none"}),
    "lr_scheduler_kwargs.min_lr_rate": "min_lr_ratio",
    "save_epoch": ("checkpoint.save_every", lambda value: {"save_strategy": "epoch"} if is_on(value) else None),
    "mixed_precision_dtype": "precision",
}
OUMI = Stack(
    name="oumi",
    title="Oumi",
    kinds=("yaml",),
    recognises=_recognises,
    spelled=unnumbered,
    keys={
        **{f"training.{key}": target for key, target in TRAINING.items()},
        "model.model_name": "model.source",
        "model.model_revision": "model.revision",
        "model.model_max_length": "data.seq_length",
        "model.torch_dtype_str": "precision",
        "model.trust_remote_code": "model.trust_remote_code",
        "data.train.datasets[].dataset_name": "datasets",
        "data.train.datasets[].dataset_path": "datasets",
        "data.train.datasets[].split": ("data.split", lambda value: str(value) if str(value).isalnum() else _part()),
        "data.train.datasets[].subset": "data.config",
        "data.train.pack": "data.packed",
        "data.train.seed": "data.seed",
        "peft.lora_r": "adapter.rank",
        "peft.lora_alpha": "adapter.alpha",
        "peft.lora_dropout": "adapter.dropout",
        "peft.lora_target_modules": "targets",
        "peft.q_lora": "four_bits",
        "megatron.tensor_model_parallel_size": "layout.tp",
        "megatron.pipeline_model_parallel_size": "layout.pp",
        "megatron.context_parallel_size": "layout.cp",
        "megatron.expert_model_parallel_size": "layout.ep",
        "megatron.micro_batch_size": "micro",
        "megatron.global_batch_size": "train.global_batch",
        "megatron.enable_sequence_packing": "data.packed",
        "megatron.transformer_config.recompute_granularity": "recompute",
    },
    left_out={
        **{f"training.{key}": why for key, why in hf.LEFT_OUT.items()},
        "training.compile": hf.SPEED,
        "training.enable_wandb": hf.LOGS,
        "training.enable_tensorboard": hf.LOGS,
        "training.empty_device_cache_steps": hf.SPEED,
        "training.save_final_model": "the last step is always saved, and exported",
        "training.trainer_kwargs.max_seq_length": "data.seq_length sets the length",
        "training.profiler.*": hf.LOGS,
        "model.attn_implementation": hf.SPEED,
        "model.enable_liger_kernel": hf.SPEED,
        "model.load_pretrained_weights": "a release is loaded; model.source: {config: ...} draws weights",
        "fsdp.*": hf.SHARDS,
        "deepspeed.*": hf.SHARDS,
        "peft.bnb_4bit_*": "model.base names the format",
        "data.train.datasets[].dataset_kwargs*": "the columns are detected; data.input and data.output set them",
        "data.train.datasets[].shuffle*": hf.DATA,
        "data.train.datasets[].transform_num_workers": hf.DATA,
        "data.train.stream": hf.DATA,
        "data.train.use_torchdata": hf.DATA,
        "data.train.collator_name": "sequences are padded or packed",
        "data.validation.datasets*": "data.validation holds out rows of data.source",
    },
    defaults={**hf.DEFAULTS, "scheduler": "linear", "kind": "none", "adapter.init": "kaiming", "data.validation": 0.0},
    differences=(
        "data.loss_on: only answers count here; TRL_SFT counts all tokens unless a collator masks them",
        HELD_OUT,
    ),
)


def _part() -> Any:
    return refuse("a part of a split: data.rows limits rows")(0)
