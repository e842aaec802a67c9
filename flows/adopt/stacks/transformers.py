"""Keys and defaults of transformers' TrainingArguments and of PEFT, which several stacks take over."""

from collections.abc import Mapping
from typing import Any

from flows.adopt.stack import Target

KEYS: Mapping[str, Target] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip_grad",
    "optim": "optimizer",
    "lr_scheduler_type": "scheduler",
    "warmup_ratio": "warmup_ratio",
    "warmup_steps": "warmup_steps",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
    "gradient_checkpointing": "recompute",
    "seed": "train.seed",
    "bf16": "bf16",
    "fp16": "fp16",
    "eval_strategy": "eval_strategy",
    "evaluation_strategy": "eval_strategy",
    "eval_steps": "eval_steps",
    "save_strategy": "save_strategy",
    "save_steps": "save_steps",
    "save_total_limit": "checkpoint.keep",
}
PATHS = "paths are set by the flow"
LOGS = "logging does not change the result"
SPEED = "kernels and communication do not change the result; the planner chooses"
DATA = "preparation of the data is cached and parallel here"
HUB = "nothing is uploaded to the Hub; promote.model registers the model"
SHARDS = "FSDP and DeepSpeed have no counterpart; the planner chooses a layout"
LEFT_OUT: Mapping[str, str] = {
    "output_dir": PATHS,
    "overwrite_output_dir": PATHS,
    "resume_from_checkpoint": "a stopped training resumes from its last checkpoint",
    "logging_*": LOGS,
    "log_*": LOGS,
    "report_to": f"{LOGS}; MLflow gets all metrics, track.wandb and track.tensorboard add others",
    "run_name": LOGS,
    "wandb_*": LOGS,
    "swanlab_*": LOGS,
    "trackio_*": LOGS,
    "push_to_hub": HUB,
    "hub_*": HUB,
    "deepspeed": SHARDS,
    "fsdp*": SHARDS,
    "ddp_*": SPEED,
    "tf32": SPEED,
    "gradient_checkpointing_kwargs*": SPEED,
    "attn_implementation": SPEED,
    "attn_impl": SPEED,
    "use_liger_kernel": SPEED,
    "liger_*": SPEED,
    "torch_compile*": SPEED,
    "dataloader_*": DATA,
    "dataset_num_proc": DATA,
    "dataset_prepared_path": DATA,
    "preprocessing_num_workers": DATA,
    "overwrite_cache": DATA,
    "group_by_length": "sequences are in random order here; data.packed avoids padding",
    "remove_unused_columns": DATA,
    "per_device_eval_batch_size": "the batch of a validation is train.global_batch",
    "save_only_model": "checkpoint.save_optimizer: false would make a resume impossible",
    "save_safetensors": "the export is in safetensors",
    "load_best_model_at_end": "export.checkpoint: best exports the best one",
    "metric_for_best_model": "the validation loss decides here",
    "greater_is_better": "the validation loss decides here",
    "use_cache": "a cache of keys and values is never used in training",
    "local_rank": SPEED,
    "include_*": LOGS,
    "disable_tqdm": LOGS,
    "plot_loss": LOGS,
}
DEFAULTS: Mapping[str, Any] = {
    "optimizer.lr": 5e-5,
    "scheduler": "linear",
    "optimizer.weight_decay": 0.0,
    "optimizer.beta2": 0.999,
    "epochs": 3,
    "micro": 8,
    "accumulation": 1,
    "save_steps": 500,
    "train.seed": 42,
}
PEFT: Mapping[str, Any] = {"adapter.init": "kaiming"}
