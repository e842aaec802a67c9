"""Keys of verl: hydra overrides of its SFT trainers and of its GRPO trainer, in commands or YAML files."""

from collections.abc import Mapping
from typing import Any

from flows.adopt.concepts import is_on, words
from flows.adopt.stack import HELD_OUT, Source, Stack, Target, marks, refuse, underscored
from flows.adopt.stacks import launchers
from flows.adopt.stacks.megatron_lm import DEGREES, TRANSFORMER

SPEED = "it changes speed or memory; the planner chooses"
LOGS = "names, paths and logs are set by the flow"
OFFLOAD = "weights stay on the GPU; optimizer.offload moves the optimizer to the host"


def _data(value: Any) -> dict[str, Any]:
    return {"datasets": words(value) if not isinstance(value, list) else value}


def _betas(value: Any) -> dict[str, Any]:
    beta1, beta2 = words(value)
    return {"optimizer.beta1": beta1, "optimizer.beta2": beta2}


def _frequency(value: Any) -> Any:
    return "epoch" if value == "after_each_epoch" else value


def _rank(value: Any) -> dict[str, Any] | None:
    return {"kind": "lora", "adapter.rank": value} if int(value) else None


def _engine(prefix: str) -> Mapping[str, Target]:
    """Return the keys of Megatron below a prefix."""
    transformer = f"{prefix}.override_transformer_config"
    return {
        **{f"{prefix}.{name}": target for name, target in DEGREES.items()},
        **{f"{transformer}.{name}": target for name, target in TRANSFORMER.items()},
        f"{prefix}.virtual_pipeline_model_parallel_size": "layout.vpp",
        f"{prefix}.use_distributed_optimizer": "optimizer.distributed",
        f"{prefix}.optimizer_offload": ("optimizer.offload", lambda value: 1.0 if is_on(value) else None),
        f"{transformer}.account_for_loss_in_pipeline_split": (
            "layout.last_stage_layers",
            refuse("set layout.last_stage_layers"),
        ),
    }


LEFT_OUT = {
    **launchers.LEFT_OUT,
    "trainer.default_*": LOGS,
    "trainer.project_name": LOGS,
    "trainer.experiment_name": LOGS,
    "trainer.logger*": LOGS,
    "trainer.resume_mode": "a stopped training resumes from its last checkpoint",
    "trainer.device": "hardware.gpu names the device",
    "trainer.val_before_train": "evaluate-base runs before the training",
    "hydra.*": LOGS,
    "config_path": LOGS,
    "config_name": LOGS,
    "use_remove_padding": "data.packed avoids padding",
    "*.use_remove_padding": "data.packed avoids padding",
    "*.enable_activation_offload": SPEED,
    "*.ulysses_sequence_parallel_size": SPEED,
    "*.ulysses_parallel_size": SPEED,
    "ulysses_sequence_parallel_size": SPEED,
    "data.shuffle": "sequences are always shuffled",
    "*.rollout.tensor_model_parallel_size": "reinforce.engine_gpus sets the GPUs of an engine",
    "*.kl_loss_type": "reinforce.kl uses the low-variance estimate",
    "*.masked_softmax_fusion": SPEED,
    "*.bias_dropout_fusion": SPEED,
    "*.nccl_timeout": SPEED,
    "*.fsdp_config.*": SPEED,
    "*.fsdp_size": SPEED,
    "*.strategy": SPEED,
    "engine": SPEED,
    "optim": "the keys of the optimizer count",
    "*.use_liger": SPEED,
    "*.use_fused_kernels": SPEED,
    "*.use_mbridge": "weights are converted by Megatron-Bridge",
    "*.vanilla_mbridge": "weights are converted by Megatron-Bridge",
    "*.use_dist_checkpointing": "convert.to names the format",
    "*.dist_checkpointing_path": LOGS,
    "*.param_offload": OFFLOAD,
    "*.grad_offload": OFFLOAD,
    "*.recompute_method": "uniform blocks of train.recompute_layers",
    "*.moe_permute_fusion": SPEED,
    "*.moe_enable_deepep": "moe.dispatcher: flex uses DeepEP",
    "*.apply_rope_fusion": SPEED,
    "*.gradient_accumulation_fusion": SPEED,
    "*.bias_activation_fusion": SPEED,
    "*.attention_backend": SPEED,
    "*_micro_batch_size*": SPEED,
    "*.use_dynamic_bsz": "micro batches have a fixed number of sequences; data.packed fills them",
    "*_use_dynamic_bsz": "micro batches have a fixed number of sequences; data.packed fills them",
    "*.max_token_len_per_gpu": "micro batches have a fixed number of sequences; data.packed fills them",
    "*_max_token_len_per_gpu": "micro batches have a fixed number of sequences; data.packed fills them",
    "data.balance_dp_token": SPEED,
    "data.val_batch_size": "a validation has train.validate_batches batches",
    "data.return_raw_chat": SPEED,
    "data.filter_overlong_prompts*": "prompts that are too long are dropped (data.too_long)",
    "data.val_files": "data.validation holds out rows of data.source",
    "*.rollout.gpu_memory_utilization": SPEED,
    "*.rollout.enforce_eager": SPEED,
    "*.rollout.free_cache_engine": SPEED,
    "*.rollout.name": "vLLM samples the answers",
    "*.rollout.mode": "vLLM samples the answers",
    "*.rollout.load_format": SPEED,
    "*.rollout.enable_chunked_prefill": SPEED,
    "*.rollout.max_num_*": SPEED,
    "*.rollout.dtype": "train.precision",
    "*.rollout.log_prob_*": SPEED,
    "*.ref.*": "the reference has the layout of the policy",
    "trainer.critic_warmup": "GRPO has no critic",
}
COMMON: Mapping[str, Target] = {
    **launchers.KEYS,
    "data.train_files": ("data.source, data.mixture", _data),
    "data.prompt_key": "data.input",
    "data.seed": "data.seed",
    "data.truncation": (
        "data.too_long",
        lambda value: {"error": "error", "left": "truncate", "right": "truncate", "middle": "truncate"}.get(value),
    ),
    "trainer.n_gpus_per_node": "gpus",
    "trainer.nnodes": "nodes",
    "trainer.seed": "train.seed",
    "trainer.save_freq": ("checkpoint.save_every", lambda value: {"save_steps": _frequency(value)}),
    "trainer.test_freq": ("train.validate_every", lambda value: {"eval_steps": _frequency(value)}),
    "trainer.max_ckpt_to_keep": "checkpoint.keep",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
}
SFT_KEYS: Mapping[str, Target] = {
    **COMMON,
    **_engine("megatron"),
    **_engine("engine"),
    "data.train_batch_size": "train.global_batch",
    "data.micro_batch_size_per_gpu": "train.micro_batch",
    "data.micro_batch_size": "train.micro_batch",
    "data.max_length": "data.seq_length",
    "data.response_key": "data.output",
    "data.messages_key": "data.messages",
    "data.multiturn.messages_key": "data.messages",
    "data.multiturn.enable": ("data.shape", lambda value: "messages" if is_on(value) else None),
    "data.pad_mode": ("data.packed", lambda value: value == "no_padding"),
    "data.prompt_dict_keys": ("data.input", refuse("a key inside of a column: write data.input as column.key")),
    "data.response_dict_keys": ("data.output", refuse("a key inside of a column: write data.output as column.key")),
    "model.partial_pretrain": "model.source",
    "model.path": "model.source",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.lora_rank": ("adapter.rank", _rank),
    "model.lora_alpha": "adapter.alpha",
    "model.target_modules": "targets",
    "model.enable_gradient_checkpointing": "recompute",
    "model.fsdp_config.model_dtype": "precision",
    "model.moe_config.freeze_moe_router": "moe.freeze_router",
    "model.override_config.moe_config.freeze_moe_router": "moe.freeze_router",
    "optim.lr": "optimizer.lr",
    "optim.betas": ("optimizer.beta1, optimizer.beta2", _betas),
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.clip_grad": "optimizer.clip_grad",
    "optim.warmup_steps_ratio": "warmup_ratio",
    "optim.lr_warmup_steps_ratio": "warmup_ratio",
    "optim.lr_warmup_steps": "warmup_steps",
    "optim.min_lr": "optimizer.min_lr",
    "optim.lr_min": "optimizer.min_lr",
    "optim.min_lr_ratio": "min_lr_ratio",
    "optim.lr_scheduler": "scheduler",
    "optim.lr_scheduler_type": "scheduler",
    "optim.lr_decay_style": "scheduler",
    "trainer.total_epochs": "epochs",
    "trainer.total_training_steps": "steps",
}
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RL_KEYS: Mapping[str, Target] = {
    **COMMON,
    **_engine(f"{A}.megatron"),
    "data.train_batch_size": "reinforce.prompts",
    "data.max_prompt_length": "prompt_tokens",
    "data.max_response_length": "reinforce.max_tokens",
    "actor_rollout_ref.model.path": "model.source",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.lora_rank": ("adapter.rank", _rank),
    "actor_rollout_ref.model.lora.rank": ("adapter.rank", _rank),
    "actor_rollout_ref.model.lora_alpha": "adapter.alpha",
    "actor_rollout_ref.model.lora.alpha": "adapter.alpha",
    "actor_rollout_ref.model.lora.dropout": "adapter.dropout",
    "actor_rollout_ref.model.lora.lora_A_init_method": "adapter.init",
    "actor_rollout_ref.model.target_modules": "targets",
    "actor_rollout_ref.model.lora.target_modules": "targets",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "recompute",
    f"{A}.optim.lr": "reinforce.lr",
    f"{A}.optim.weight_decay": "optimizer.weight_decay",
    f"{A}.optim.clip_grad": "optimizer.clip_grad",
    f"{A}.grad_clip": "optimizer.clip_grad",
    f"{A}.kl_loss_coef": "reinforce.kl",
    f"{A}.clip_ratio_low": "reinforce.clip_low",
    f"{A}.clip_ratio_high": "reinforce.clip_high",
    f"{A}.ppo_mini_batch_size": (
        "reinforce.updates",
        refuse("set reinforce.updates to the prompts of a step divided by this number"),
    ),
    f"{R}.n": "reinforce.samples",
    f"{R}.temperature": "reinforce.temperature",
    "algorithm.adv_estimator": (
        "reinforce.loss",
        lambda value: (
            "grpo" if value == "grpo" else refuse("advantages here are relative to the prompt, as in GRPO")(0)
        ),
    ),
    "trainer.total_training_steps": "reinforce.steps",
    "trainer.total_epochs": ("reinforce.steps", refuse("set reinforce.steps, the number of rounds")),
}


def _is_sft(source: Source) -> int:
    if source.kind == "command":
        text = " ".join(source.words)
        return 20 if "verl" in text and "sft" in text else 5 * (marks(source, "data.train_files") and _marked(source))
    return 3 * _marked(source) if marks(source, "data.train_files") else 0


def _marked(source: Source) -> int:
    return marks(source, "model.partial_pretrain", "model.path", "data.prompt_key", "optim.lr", "trainer.total_epochs")


def _is_rl(source: Source) -> int:
    known = marks(source, "actor_rollout_ref.model.path", f"{R}.n", f"{A}.optim.lr", "algorithm.adv_estimator")
    return 10 * known if known > 1 else 0


DEFAULTS = {"adapter.init": "kaiming", "kind": "none", "data.validation": 0.05}
VERL = Stack(
    name="verl",
    title="verl",
    kinds=("command", "yaml"),
    recognises=_is_sft,
    spelled=lambda key: underscored(key) if "." not in key else key,
    keys=SFT_KEYS,
    left_out=LEFT_OUT,
    defaults={
        **DEFAULTS,
        "train.global_batch": 256,
        "data.seq_length": 1024,
        "optimizer.lr": 1e-5,
        "optimizer.weight_decay": 0.01,
        "warmup_ratio": 0.1,
        "epochs": 4,
        "tp_default": True,
    },
    differences=(HELD_OUT,),
)
VERL_RL = Stack(
    name="verl-rl",
    title="verl's reinforcement learning",
    kinds=("command", "yaml"),
    recognises=_is_rl,
    spelled=lambda key: underscored(key) if "." not in key else key,
    keys=RL_KEYS,
    left_out=LEFT_OUT,
    defaults={
        **DEFAULTS,
        "reinforce.start": "base",
        "checkpoint.save_every": 100,
        "reinforce.steps": 100,
        "reinforce.samples": 1,
        "reinforce.prompts": 1024,
        "train.global_batch": 16,
        "optimizer.lr": 1e-6,
        "reinforce.lr": 1e-6,
        "optimizer.weight_decay": 0.01,
        "epochs": 1,
        "tp_default": True,
    },
    differences=(
        "reinforce.steps: verl counts epochs over the prompts; the number of rounds must be set",
        "reinforce.reward: the rewards of verl are Python functions; exact is the default here",
        "reinforce.lr: constant after the first step",
    ),
)
