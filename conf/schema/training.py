"""Sections `train`, `optimizer` and `moe` of a run's YAML: the computation of a step and its memory.

Rules between their keys are in conf/rules/precision.py.
"""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.named import Objective
from conf.schema.sections import Count, IntervalOrNever, Number, Place, Section, Seed, Text

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class Train(Section):
    """Objective, steps, batches and the memory for activations."""

    objective: Annotated[Objective, bears("train", absent="sft")] = "sft"
    """sft = the next token of answers or texts; dpo = prefer the chosen to the rejected answer; distill = the teacher's
    distribution of the next token of answers"""
    dpo_beta: Annotated[float, bears("train", absent=0.1)] = Field(default=0.1, ge=1e-6, le=100)
    """of dpo: weight of the distance from the reference; TRL's default"""
    dpo_label_smoothing: Annotated[float, bears("train", absent=0.0)] = Field(default=0.0, ge=0, lt=0.5)
    """of dpo: assumed share of rows whose answers are in the wrong order"""
    z_loss: Annotated[float, bears("train", absent=0.0)] = Field(default=0.0, ge=0, le=1)
    """weight of the squared logarithm of the softmax's sum, which keeps logits small; 1e-4 is usual; for routers see
    moe.z_loss_coeff"""
    steps: Annotated[Count | None, bears("train", absent=None)] = None
    """optimizer steps of the whole schedule; this or epochs is required"""
    epochs: Annotated[float | None, bears("train", absent=None)] = Field(default=None, ge=1e-6, le=10_000)
    """passes over the training sequences, such as 3 or 0.5; the number of steps is known after the data are prepared"""
    teacher: Annotated[Place | None, bears(derived="download", held=True)] = None
    """of distill: Hugging Face Hub id, folder, s3:// URI, or tiny://KIND, of a model with the same tokenizer and
    vocabulary"""
    teacher_top_k: Annotated[Count, bears("reference", "train", absent=64)] = 64
    """of distill: number of most likely tokens kept per position; all others count as one"""
    distill_temperature: Annotated[float, bears("reference", "train", absent=1.0)] = Field(default=1.0, ge=0.01, le=100)
    """of distill: divides the logits of both models; above 1 unlikely tokens count more"""
    global_batch: Annotated[Count, bears("train")]
    """sequences per step, over all ranks; with dpo, rows of two sequences"""
    micro_batch: Annotated[Count, NOWHERE] = 1
    """sequences per forward pass of a rank, joined if packed; with dpo, rows of two sequences; 1 = least memory"""
    ramp_from: Annotated[Count | None, bears("train", absent=None)] = None
    """sequences of the first steps, for texts; they grow to global_batch; null = no ramp"""
    ramp_by: Annotated[Count | None, bears("train", absent=None)] = None
    """increment of the sequences per step; null = ramp_from"""
    ramp_sequences: Annotated[Count | None, bears("train", absent=None)] = None
    """number of sequences after which steps have global_batch sequences"""
    seed: Annotated[Seed, bears("train", derived="download")] = 1234
    """seed of drawn weights, adapters and dropout; Megatron's default"""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], bears("convert", "train", derived="evaluate")] = "bf16"
    """weights and activations; fp32 for CPU runs; fp16 scales the loss"""
    loss_scale: Annotated[float, bears("train", absent=1024.0)] = Field(default=1024.0, ge=1, le=2**32)
    """initial loss scale of fp16, whose loss is a sum over tokens: halved after each step with overflowing gradients,
    which is skipped, and doubled after 1000 steps without one"""
    fp8: Annotated[Literal["current", "delayed", "blockwise", "mxfp8"] | None, bears("train", absent=None)] = None
    """scaling recipe of FP8 layers: blockwise suits Hopper, mxfp8 needs Blackwell; null = no FP8"""
    fp8_weights: Annotated[bool, bears("train", absent=False)] = False
    """keep LoRA's frozen weights only in FP8, without a bf16 copy"""
    recompute: Annotated[Literal["none", "selective", "full"], NOWHERE] = "none"
    """activations recomputed in the backward pass; full = of complete layers"""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], NOWHERE] = Field(default=(), strict=False)
    """for selective; moe_act and layernorm are cheap"""
    recompute_layers: Annotated[Count, NOWHERE] = 1
    """for full: layers per block; 1 = least memory"""
    recompute_first: Annotated[Count | None, NOWHERE] = None
    """for full: only the first layers of each (virtual) stage, without MTP's; null = all"""
    cuda_graphs: Annotated[bool, NOWHERE] = False
    """record layers after the third step and run them as CUDA graphs, if the GPU waits for its host; without experts,
    and with data.packed without attention"""
    overlap_tp: Annotated[bool, NOWHERE] = False
    """when all weights are trained with layout.sp: overlap the tensor-parallel communication with the products, piece
    by piece, through CUDA IPC within a host"""
    validate_every: Annotated[IntervalOrNever, bears("train", held=False)] = 0
    """steps between validations; below 1 = share of all steps; epoch = once per epoch; 0 = never"""
    validate_batches: Annotated[Count, bears("train", held=False)] = 10
    """global batches per validation"""
    stop_after_worse: Annotated[Count | None, bears("train", absent=None, held=False)] = None
    """end after this many consecutive validations without a new best one; null = train all steps"""
    ema_decay: Annotated[float | None, bears("train", absent=None)] = Field(default=None, ge=0.01, lt=1)
    """checkpoints also contain a moving mean of the weights with this decay per step (0.999); 4 bytes per trained
    parameter on each rank; null = none"""
    verify_every: Annotated[Number, NOWHERE] = 20
    """steps between comparisons of the weights on all data-parallel ranks, which find changed bits; 0 = only at
    checkpoints"""
    repeat_every: Annotated[Number, NOWHERE] = 0
    """steps between steps that are computed twice, the first time with the batches of another data-parallel rank, to
    find a host that computes wrong; so are steps with a checkpoint; needs deterministic kernels; 0 = never"""
    stop_after: Annotated[Count | None, bears("train", held=False)] = None
    """end after this step, with an unchanged schedule; for rehearsals"""

    @property
    def batch_ramp(self) -> tuple[int, int, int] | None:
        """The first batch size, its increment, and the sequences of the ramp, as in rampup_batch_size."""
        if self.ramp_from is None or self.ramp_sequences is None:
            return None
        return self.ramp_from, self.ramp_by or self.ramp_from, self.ramp_sequences


class Optimizer(Section):
    """AdamW or Muon, and its learning rate."""

    kind: Annotated[Literal["adamw", "muon"], bears("train", absent="adamw")] = "adamw"
    """muon = orthogonal updates of matrices, as large as AdamW's; embeddings, head, norms and biases use AdamW; needs
    adapter.kind none and optimizer.distributed false"""
    lr: Annotated[float, bears("train")] = Field(gt=0, le=1)
    """highest learning rate, reached after warmup"""
    min_lr: Annotated[float, bears("train")] = Field(default=0.0, ge=0)
    """learning rate at the last step"""
    warmup_steps: Annotated[Number, bears("train")] = 0
    """steps of linear rise from 0"""
    warmup: Annotated[float | None, bears("train", absent=None)] = Field(default=None, ge=0, lt=1)
    """warmup as a share of all steps, such as 0.03, instead of warmup_steps"""
    decay: Annotated[Literal["cosine", "linear", "constant"], bears("train")] = "cosine"
    """shape of the fall from lr to min_lr"""
    weight_decay: Annotated[float, bears("train")] = Field(default=0.1, ge=0, le=10)
    """decoupled; biases and norms are exempt"""
    without_decay: Annotated[tuple[Text, ...] | None, bears("train", absent=None)] = Field(default=None, strict=False)
    """further exempt weights, such as "*embedding*", by Megatron's names"""
    beta1: Annotated[float, bears("train")] = Field(default=0.9, ge=0, le=0.99999)
    """decay of the mean of gradients, per step"""
    beta2: Annotated[float, bears("train")] = Field(default=0.95, ge=0, le=0.999999)
    """of the mean of squares; 0.95 is usual for LLMs"""
    eps: Annotated[float, bears("train")] = Field(default=1e-8, ge=1e-30, le=1)
    """keeps the division by the root of squares finite"""
    clip_grad: Annotated[float, bears("train")] = Field(default=1.0, ge=0, le=1e9)
    """largest norm of the gradient; 0 = no clipping"""
    # A resume keeps distributed and offload, as Megatron does not load the state of another kind of optimizer.
    distributed: Annotated[bool, bears(held=True)] = True
    """shard the optimizer's state over data-parallel ranks"""
    states: Annotated[Literal["fp32", "bf16", "fp8"], bears("train", absent="fp32")] = "fp32"
    """precision of its two means; the fp32 copy of the weights stays"""
    gradients: Annotated[Literal["fp32", "bf16"], bears("train", absent="fp32")] = "fp32"
    """precision of the sum of gradients over microbatches and ranks"""
    offload: Annotated[float, bears(held=True)] = Field(default=0.0, ge=0, le=1)
    """share of its state and step on the host, with 16 bytes per parameter"""


class Moe(Section):
    """Routing of tokens to experts. A dense model ignores its losses."""

    aux_loss_coeff: Annotated[float | None, bears("train")] = Field(default=None, ge=0, le=10)
    """weight of the balancing loss, a mean over rows; null = the model's"""
    z_loss_coeff: Annotated[float | None, bears("train")] = Field(default=None, ge=0, le=1)
    """weight of the z loss; null = none; 1e-3 is usual"""
    router_dtype: Annotated[Literal["fp32", "fp64"], bears("train")] = "fp32"
    """of routing scores; bf16 flips ties"""
    freeze_router: Annotated[bool, bears("train")] = False
    """keep the router's weights as released"""
    balance: Annotated[Literal["model", "none", "aux_loss", "seq_aux_loss"], bears("train")] = "model"
    """balancing loss; model = Megatron-Bridge's choice for this architecture; aux_loss and seq_aux_loss are equal:
    computed per row, without padding, at any micro_batch and layout"""
    force_balance: Annotated[bool, bears("train")] = False
    """route evenly at random: for measurements only"""
    dispatcher: Annotated[Literal["alltoall", "allgather", "flex"], NOWHERE] = "alltoall"
    """communication from tokens to experts; flex = DeepEP or HybridEP"""
    # Without it adapters of experts begin with other numbers of the same distribution; a resume loads them.
    grouped_gemm: Annotated[bool, bears("train", absent=True, held=False)] = True
    """compute all experts of a rank in one kernel"""
