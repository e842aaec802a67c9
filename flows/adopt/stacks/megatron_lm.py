"""Keys of Megatron-LM: shell scripts with pretrain_gpt.py and the like. The names are those of its arguments."""

from collections.abc import Mapping

from flows.adopt.concepts import is_on
from flows.adopt.stack import Source, Stack, Target, marks, refuse, underscored
from flows.adopt.stacks import launchers
from flows.adopt.stacks import transformers as hf

DRAWN = refuse("a size of the model: set model.source to its release, or to {config: ...} for drawn weights")
DEGREES: Mapping[str, Target] = {
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.etp",
    "sequence_parallel": "layout.sp",
}
MOE: Mapping[str, Target] = {
    "moe_aux_loss_coeff": "moe.aux_loss_coeff",
    "moe_z_loss_coeff": "moe.z_loss_coeff",
    "moe_grouped_gemm": "moe.grouped_gemm",
    "moe_token_dispatcher_type": "moe.dispatcher",
}
TRANSFORMER: Mapping[str, Target] = {
    **MOE,
    "num_layers_in_first_pipeline_stage": "layout.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "layout.last_stage_layers",
    "recompute_granularity": "recompute",
    "recompute_num_layers": "train.recompute_layers",
    "recompute_modules": "train.recompute_modules",
}
UNTIL_THE_END = ("train.steps", refuse("the learning rate falls until the last step, train.steps"))
SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts"),
    *(
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "rotary_base",
        "kv_channels",
        "moe_layer_freq",
        "position_embedding_type",
    ),
    *("normalization", "max_position_embeddings", "swiglu", "group_query_attention", "disable_bias_linear"),
    *("untie_embeddings_and_output_weights", "moe_shared_expert_intermediate_size", "make_vocab_size_divisible_by"),
    *(
        "init_method_std",
        "rotary_percent",
        "norm_epsilon",
        "qk_layernorm",
        "multi_latent_attention",
        "no_position_embedding",
    ),
    *(
        "mtp_num_layers",
        "tokenizer_type",
        "tokenizer_model",
        "vocab_file",
        "merge_file",
        "vocab_size",
        "use_rotary_position_embeddings",
    ),
)
SPEED_KEYS = (
    *("overlap_*", "tp_comm_overlap*", "no_masked_softmax_fusion", "no_*_fusion", "use_flash_attn", "transformer_impl"),
    *("attention_backend", "use_mcore_models", "no_gradient_accumulation_fusion", "ddp_*", "distributed_*"),
    *(
        "moe_permute_fusion",
        "cross_entropy_*",
        "manual_gc*",
        "num_workers",
        "use_torch_fsdp2",
        "data_parallel_sharding*",
    ),
    *("moe_router_dtype", "grad_reduce_in_bf16", "calculate_per_token_loss", "no_check_for_nan*", "apply_layernorm_1p"),
    *(
        "no_create_attention_mask*",
        "cuda_graph*",
        "use_megatron_fsdp",
        "init_model_with_meta_device",
        "fp8_param_gather",
    ),
)


def _recognises(source: Source) -> int:
    text = " ".join(source.words)
    known = marks(
        source, "micro-batch-size", "lr-decay-style", "tensor-model-parallel-size", "train-iters", "num-layers"
    )
    named = any(name in text for name in ("pretrain_gpt.py", "pretrain_mamba.py", "finetune.py", "train.py"))
    return 10 + known if known > 1 and (named or known > 3) else 0


MEGATRON_LM = Stack(
    name="megatron-lm",
    title="Megatron-LM",
    kinds=("command",),
    recognises=_recognises,
    spelled=underscored,
    keys={
        **launchers.KEYS,
        **DEGREES,
        **TRANSFORMER,
        **dict.fromkeys(SIZES, ("model.source", DRAWN)),
        "hf_model": "model.source",
        "data_path": "data.source",
        "seq_length": "data.seq_length",
        "micro_batch_size": "micro",
        "global_batch_size": "train.global_batch",
        "train_iters": "steps",
        "train_samples": ("train.steps", refuse("set train.steps to these samples divided by train.global_batch")),
        "rampup_batch_size": ("train.ramp_from", refuse("set train.ramp_from, ramp_by and ramp_sequences")),
        "lr": "optimizer.lr",
        "min_lr": "optimizer.min_lr",
        "lr_decay_style": "scheduler",
        "lr_warmup_iters": "warmup_steps",
        "lr_warmup_fraction": "warmup_ratio",
        "lr_decay_iters": UNTIL_THE_END,
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.eps",
        "clip_grad": "optimizer.clip_grad",
        "optimizer": "optimizer",
        "use_distributed_optimizer": "optimizer.distributed",
        "bf16": "bf16",
        "fp16": "fp16",
        "fp8_recipe": "train.fp8",
        "initial_loss_scale": "train.loss_scale",
        "attention_dropout": "model.dropout",
        "seed": "train.seed",
        "save_interval": "save_steps",
        "eval_interval": "eval_steps",
        "eval_iters": "train.validate_batches",
        "no_save_optim": ("checkpoint.save_optimizer", lambda value: not is_on(value)),
        "recompute_activations": ("train.recompute", lambda value: {"recompute": "selective"} if is_on(value) else {}),
    },
    left_out={
        **launchers.LEFT_OUT,
        **dict.fromkeys(SPEED_KEYS, hf.SPEED),
        "recompute_method": "uniform blocks of train.recompute_layers",
        "moe_router_load_balancing_type": "moe.balance: the model's own",
        "save": hf.PATHS,
        "load": hf.PATHS,
        "data_cache_path": hf.PATHS,
        "pretrained_checkpoint": hf.PATHS,
        "tensorboard_*": hf.LOGS,
        "wandb_*": hf.LOGS,
        "log_*": hf.LOGS,
        "timing_log_*": hf.LOGS,
        "profile*": hf.LOGS,
        "no_load_*": "a new training starts at step 0; a stopped one resumes",
        "exit_*": "a stopped training resumes from its last checkpoint",
        "split": "data.validation and data.test are shares of the rows",
        "ckpt_format": "checkpoints are torch_dist",
        "dist_ckpt_*": "checkpoints are torch_dist",
        "async_save": "checkpoint.background",
        "use_checkpoint_args": hf.PATHS,
    },
    defaults={
        "kind": "none",
        "optimizer.distributed": False,
        "scheduler": "linear",
        "optimizer.weight_decay": 0.01,
        "optimizer.beta2": 0.999,
        "tp_default": True,
        "data.validation": 0.05,
        "save_steps": 1000,
    },
    differences=(
        "train.precision: without --bf16 or --fp16 Megatron-LM computes in fp32; bf16 is the default here",
        "model.dropout: the default of Megatron-LM is 0.1; the release's own value counts here, mostly 0",
        "data.source: a prefix of .bin and .idx files works here too",
    ),
)
