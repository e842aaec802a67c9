"""Keys of torchtune: its YAML files for LoRA, full and DPO recipes."""

from typing import Any

from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, Source, Stack, marks, refuse, unnumbered
from flows.adopt.stacks import load_dataset
from flows.adopt.stacks import transformers as hf

# Data sets that torchtune names by a builder, with their Hub ids.
BUILDERS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "grammar_dataset": "liweili/c4_200m",
}
NOT_READ = "the builder of another kind of model or recipe"


def _recognises(source: Source) -> int:
    known = marks(source, "model._component_", "tokenizer._component_", "checkpointer._component_", "loss._component_")
    return 10 * known if known > 1 and "torchtune" in str(source.keys.get("model._component_")) else 0


def _model(value: Any) -> dict[str, Any]:
    """Read lora_llama3_1_8b: the prefix tells the adapter; checkpointer.checkpoint_dir is the model."""
    name = str(value).rpartition(".")[2]
    if name.startswith("qlora"):
        return {"kind": "qlora"}
    return {"kind": "lora" if name.startswith("lora") else "none"}


def _data(value: Any) -> dict[str, Any]:
    name = str(value).rpartition(".")[2]
    if name not in BUILDERS:
        refuse("a builder of torchtune: set data.source")(0)
    return {"datasets": [BUILDERS[name]]}


def _folder(value: Any) -> str:
    """Return a checkpoint's folder. torchtune downloads to /tmp/NAME."""
    return str(value).rstrip("/")


def _schedule(value: Any) -> dict[str, Any]:
    return (
        {"scheduler": "cosine"} if "cosine" in str(value) else refuse("optimizer.decay is cosine, linear, constant")(0)
    )


def _loss(value: Any) -> Any:
    if "CrossEntropy" in str(value):
        return {}
    return {"method": "dpo"} if "DPO" in str(value) else refuse("the objectives here are sft, dpo and distill")(0)


TORCHTUNE = Stack(
    name="torchtune",
    title="torchtune",
    kinds=("yaml",),
    recognises=_recognises,
    spelled=unnumbered,
    keys={
        "model._component_": ("adapter.kind", _model),
        "model.lora_rank": "adapter.rank",
        "model.lora_alpha": "adapter.alpha",
        "model.lora_dropout": "adapter.dropout",
        "model.lora_attn_modules": "targets",
        "model.apply_lora_to_mlp": (
            "adapter.targets",
            lambda value: {"mlp_targets": ["gate_proj", "up_proj", "down_proj"]} if is_on(value) else None,
        ),
        "model.apply_lora_to_output": (
            "adapter.targets",
            lambda value: refuse("the output layer gets no adapter")(0) if is_on(value) else {},
        ),
        "model.use_dora": "dora",
        "checkpointer.checkpoint_dir": ("model.source", _folder),
        "tokenizer.max_seq_len": "data.seq_length",
        "dataset._component_": ("data.source", _data),
        "dataset.source": load_dataset.NAME,
        "dataset.data_files": load_dataset.FILES,
        "dataset[]._component_": ("data.source", _data),
        "dataset[].source": load_dataset.NAME,
        "dataset[].data_files": load_dataset.FILES,
        "dataset.packed": "data.packed",
        "dataset.split": ("data.split", lambda value: str(value) if str(value).isalnum() else _part()),
        "dataset.train_on_input": "prompts_in_loss",
        "seed": "train.seed",
        "optimizer._component_": "optimizer",
        "optimizer.lr": "optimizer.lr",
        "optimizer.weight_decay": "optimizer.weight_decay",
        "optimizer.eps": "optimizer.eps",
        "lr_scheduler._component_": ("optimizer.decay", _schedule),
        "lr_scheduler.num_warmup_steps": "warmup_steps",
        "loss._component_": ("train.objective", _loss),
        "loss.beta": "train.dpo_beta",
        "loss.label_smoothing": "train.dpo_label_smoothing",
        "epochs": "epochs",
        "max_steps_per_epoch": ("train.steps", lambda value: refuse("set train.steps")(0) if value else {}),
        "batch_size": "micro",
        "gradient_accumulation_steps": "accumulation",
        "clip_grad_norm": "optimizer.clip_grad",
        "run_val_every_n_steps": "eval_steps",
        "dtype": "precision",
        "enable_activation_checkpointing": "recompute",
        "tensor_parallel_dim": "layout.tp",
    },
    left_out={
        "output_dir": hf.PATHS,
        "tokenizer.*": "the tokenizer is the model's",
        "checkpointer.*": "a release is read by its config.json",
        "resume_from_checkpoint": "a stopped training resumes from its last checkpoint",
        "save_adapter_weights_only": "checkpoint.save_optimizer decides on the optimizer",
        "shuffle": "sequences are always shuffled",
        "dataset_val*": "data.validation holds out rows of data.source",
        "batch_size_val": "the batch of a validation is train.global_batch",
        "optimizer.fused": hf.SPEED,
        "optimizer_in_bwd": hf.SPEED,
        "compile": hf.SPEED,
        "device": "hardware.gpu names the device",
        "enable_activation_offloading": hf.SPEED,
        "fsdp*": hf.SHARDS,
        "custom_sharded_layers": hf.SHARDS,
        "low_cpu_ram": hf.SPEED,
        "tensor_parallel_plan*": "Megatron cuts the layers",
        "metric_logger*": hf.LOGS,
        "log_*": hf.LOGS,
        "profiler*": hf.LOGS,
    },
    defaults={
        "scheduler": "constant",
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.01,
        "optimizer.beta2": 0.999,
        "optimizer.clip_grad": 0.0,
        "adapter.init": "kaiming",
        "kind": "none",
        "accumulation": 1,
        "data.validation": 0.0,
        "save_strategy": "epoch",
    },
    differences=(
        "model.source: a folder of torchtune's download; a Hub id works too",
        "data.loss_on: only answers count here, as with train_on_input: false",
        HELD_OUT,
    ),
)


def _part() -> Any:
    return refuse("a part of a split: data.rows limits rows")(0)
