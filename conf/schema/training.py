"""Sections `train`, `optimizer` and `moe` of a run's YAML: what a step does, and how its memory is spent.

Which of their values go together stands in conf/rules/precision.py.
"""

from typing import Literal

from pydantic import Field

from conf.schema.sections import Count, Number, Section, Seed

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class Train(Section):
    """Steps, batches and the memory for activations."""

    steps: Count = Field(description="optimizer steps of the whole schedule")
    global_batch: Count = Field(description="sequences per step, over all ranks")
    micro_batch: Count = Field(default=1, description="sequences per forward pass of a rank; 1 = least memory")
    seed: Seed = Field(default=1234, description="weights, dropout; Megatron's default")
    precision: Literal["fp32", "bf16"] = Field(default="bf16", description="weights and activations; fp32 for CPU runs")
    fp8: Literal["current", "delayed", "blockwise", "mxfp8"] | None = Field(
        default=None,
        description="layers compute in FP8, scaled so: blockwise suits Hopper, mxfp8 needs Blackwell; null = no FP8",
    )
    fp8_weights: bool = Field(
        default=False, description="keep the frozen weights below LoRA in FP8 alone, without the bf16 they came in"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="activations computed again in backward; full = of whole layers"
    )
    recompute_modules: tuple[RecomputeModule, ...] = Field(
        default=(), strict=False, description="for selective; moe_act, layernorm are cheap"
    )
    recompute_layers: Count = Field(default=1, description="for full: layers per block; 1 = least memory")
    validate_every: Number = Field(default=0, description="steps between validations; 0 = never")
    validate_batches: Count = Field(default=10, description="global batches per validation")
    stop_after: Count | None = Field(
        default=None, description="end after this step, schedule unchanged; for rehearsals"
    )


class Optimizer(Section):
    """AdamW and its learning rate."""

    lr: float = Field(gt=0, le=1, description="highest learning rate, reached after warmup")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step")
    warmup_steps: Number = Field(default=0, description="steps of linear rise from 0")
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="shape of the fall from lr to min_lr"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled; biases and norms are exempt")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients, per step")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="of the mean of squares; 0.95 is usual for LLMs")
    eps: float = Field(default=1e-8, gt=0, description="keeps the division by the root of squares finite")
    clip_grad: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0 = no clipping")
    distributed: bool = Field(default=True, description="shard the optimizer's state over data-parallel ranks")
    states: Literal["fp32", "bf16", "fp8"] = Field(
        default="fp32", description="how its two means are kept; the weights' own fp32 copy stays"
    )
    gradients: Literal["fp32", "bf16"] = Field(
        default="fp32", description="how gradients are summed over microbatches and ranks"
    )
    offload: float = Field(
        default=0.0, ge=0, le=1, description="share of its state and step on the host, 16 bytes a parameter there"
    )


class Moe(Section):
    """Routing of tokens to experts; without effect on a dense model."""

    aux_loss_coeff: float | None = Field(default=None, ge=0, description="weight of balancing; null = the model's own")
    z_loss_coeff: float | None = Field(
        default=None, ge=0, description="weight of the z loss; null = none; 1e-3 is usual"
    )
    router_dtype: Literal["fp32", "fp64"] = Field(default="fp32", description="of routing scores; bf16 flips ties")
    freeze_router: bool = Field(default=False, description="keep the router's weights as released")
    balance: Literal["model", "none", "aux_loss", "seq_aux_loss"] = Field(
        default="model", description="balancing loss; model = what Megatron-Bridge sets for this architecture"
    )
    force_balance: bool = Field(default=False, description="route evenly at random: for measurements only")
    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        default="alltoall", description="from tokens to experts; flex = DeepEP or HybridEP"
    )
    grouped_gemm: bool = Field(default=True, description="compute all experts of a rank in one kernel")
