"""Axolotl: a YAML file."""

from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, Source, Stack, marks, refuse, unnumbered
from flows.adopt.stacks import load_dataset
from flows.adopt.stacks import transformers as hf


def _recognises(source: Source) -> int:
    known = marks(source, "base_model", "micro_batch_size", "sequence_len", "num_epochs", "datasets[0].path", "adapter")
    return known * 3 if "base_model" in source.keys and known > 1 else 0


def _adapter(value: object) -> dict[str, object]:
    return {"kind": value} if value in ("lora", "qlora", "dora") else refuse("adapter.kind is lora or dora")(value)


AXOLOTL = Stack(
    name="axolotl",
    title="Axolotl",
    kinds=("yaml",),
    recognises=_recognises,
    spelled=unnumbered,
    keys={
        **{key: target for key, target in hf.KEYS.items() if key not in ("optim", "lr_scheduler_type")},
        "base_model": "model.source",
        "revision_of_model": "model.revision",
        "trust_remote_code": "model.trust_remote_code",
        "adapter": ("adapter.kind, model.base", _adapter),
        "lora_r": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target_modules": "targets",
        "lora_target_linear": ("targets", lambda value: "all-linear" if is_on(value) else None),
        "lora_model_dir": "model.adapter",
        "peft_use_rslora": "adapter.rslora",
        "peft_use_dora": "dora",
        "loraplus_lr_ratio": "adapter.b_lr_ratio",
        "load_in_4bit": "four_bits",
        "load_in_8bit": "eight_bits",
        "datasets[].path": load_dataset.NAME,
        "datasets[].data_files": load_dataset.FILES,
        "datasets[].split": "data.split",
        "datasets[].name": "data.config",
        "datasets[].field_messages": "data.messages",
        "pretraining_dataset": "datasets",
        "pretraining_dataset[].path": "datasets",
        "val_set_size": "validation",
        "sequence_len": "data.seq_length",
        "sample_packing": "data.packed",
        "train_on_inputs": "prompts_in_loss",
        "micro_batch_size": "micro",
        "num_epochs": "epochs",
        "optimizer": "optimizer",
        "lr_scheduler": "scheduler",
        "cosine_min_lr_ratio": "min_lr_ratio",
        "saves_per_epoch": "saves_per_epoch",
        "evals_per_epoch": "evals_per_epoch",
        "early_stopping_patience": "train.stop_after_worse",
        "rl": "method",
        "rl_beta": "train.dpo_beta",
        "dpo_label_smoothing": "train.dpo_label_smoothing",
        "context_parallel_size": "layout.cp",
        "tensor_parallel_size": "layout.tp",
        "expert_parallel_size": "layout.ep",
        "shuffle_merged_datasets": (
            "data.seed",
            lambda value: None if is_on(value) else refuse("sequences are always shuffled")(value),
        ),
    },
    left_out={
        **hf.LEFT_OUT,
        "model_type": "the family is read from config.json",
        "tokenizer_type": "the tokenizer is the model's",
        "tokenizer_config": "the tokenizer is the model's; for drawn weights see model.tokenizer",
        "is_*_derived_model": "the family is read from config.json",
        "datasets[].type": "the columns are detected; data.input, data.output and data.shape set them",
        "datasets[].ds_type": "the format is detected by content",
        "strict": "a coverage check compares all tensors",
        "plugins*": hf.SPEED,
        "lora_*_kernel": hf.SPEED,
        "flash_attention": hf.SPEED,
        "xformers_attention": hf.SPEED,
        "sdp_attention": hf.SPEED,
        "flash_attn_*": hf.SPEED,
        "use_kernels": hf.SPEED,
        "cut_cross_entropy": hf.SPEED,
        "activation_offloading": hf.SPEED,
        "eval_sample_packing": "validation is packed as training is",
        "pad_to_sequence_len": "batches are padded to data.seq_length",
        "eval_batch_size": "the batch of a validation is train.global_batch",
        "loss_watchdog_*": "a training without a finite loss ends by default",
        "debug": hf.LOGS,
        "save_first_step": "the last step and each interval are saved",
        "dp_shard_size": hf.SHARDS,
        "dp_replicate_size": hf.SHARDS,
        "auto_resume_from_checkpoints": "a stopped training resumes from its last checkpoint",
    },
    defaults={
        "kind": "none",
        "adapter.init": "kaiming",
        "optimizer.weight_decay": 0.0,
        "optimizer.beta2": 0.999,
        "optimizer.clip_grad": 1.0,
        "scheduler": "cosine",
        "epochs": 1,
        "accumulation": 1,
        "save_strategy": "epoch",
        "train.seed": 42,
    },
    differences=(HELD_OUT,),
)
