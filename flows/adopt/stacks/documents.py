"""Five published guides, by their titles. Their values stand in tables, lists and code blocks.

Each guide has a configuration in conf/documented or conf/, which the result extends; keys that differ are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.adopt.stack import Source, Stack, Target

GRIDS = (
    "The guide counts TP x PP x EP x DP. Megatron has two grids: dp = GPUs / (tp * pp * cp), and "
    "edp = GPUs / (etp * ep * pp); ep is not a factor of dp"
)
GLM47_KEYS: Mapping[str, Target] = {
    "Tensor (TP)": "layout.tp",
    "Expert (EP)": "layout.ep",
    "LoRA.dim": "adapter.rank",
    "LoRA.alpha": "adapter.alpha",
    "LoRA.dropout": "adapter.dropout",
    "Global batch size": "train.global_batch",
    "Micro batch size": "train.micro_batch",
    "Sequence length": "data.seq_length",
    "Learning rate": ("optimizer.lr", lambda value: str(value).split()[0]),
    "Warmup iterations": "optimizer.warmup_steps",
    "Training iterations": "train.steps",
    "Checkpoint interval": "checkpoint.save_every",
    "Pipeline (PP)": "layout.pp",
    "Activation recomputation": ("train.recompute", lambda value: "full" if "Full" in str(value) else None),
    "Mixed precision": ("train.precision", lambda value: "bf16" if "BF16" in str(value) else None),
    "Sequence parallel": ("layout.sp", lambda value: str(value).startswith("Enabled")),
}
SWIFT_KEYS: Mapping[str, Target] = {
    "--tp-size": "layout.tp",
    "--ep-size": "layout.ep",
    "--pp-size": "layout.pp",
    "--cp-size": "layout.cp",
    "--sequence_parallel": "layout.sp",
    "Rank": "adapter.rank",
    "Alpha": "adapter.alpha",
    "Epochs": "train.epochs",
    "Max sequence length": "data.seq_length",
    "Global batch size": "train.global_batch",
    "Learning rate": "optimizer.lr",
    "LR warmup": ("optimizer.warmup", lambda value: float(str(value).split("%")[0]) / 100),
    "Min LR": ("optimizer.min_lr", lambda value: 1e-5 if value == "lr/10" else None),
    "Auxiliary loss coefficient": "moe.aux_loss_coeff",
    "Recompute granularity": "train.recompute",
    "Recompute num layers": "train.recompute_layers",
    "Save interval": ("checkpoint.save_every", lambda value: "".join(filter(str.isdigit, str(value)))),
    "Eval interval": ("train.validate_every", lambda value: "".join(filter(str.isdigit, str(value)))),
    "Eval iterations": "train.validate_batches",
    "Grouped GEMM": "moe.grouped_gemm",
}
VERL_KEYS: Mapping[str, Target] = {
    "Expert Parallelism": "layout.ep",
    "Pipeline Parallelism": "layout.pp",
    "Tensor Parallelism": "layout.tp",
    "NNODES": "layout.nodes",  # of the commands
}
GPT2_KEYS: Mapping[str, Target] = {
    "micro-batch-size": "train.micro_batch",
    "global-batch-size": "train.global_batch",
}
OUMI_KEYS: Mapping[str, Target] = {
    "model.model_name": "model.source",
    "training.per_device_train_batch_size": "train.micro_batch",
    "training.max_steps": "train.steps",
    "training.learning_rate": "optimizer.lr",
    "megatron.tensor_model_parallel_size": "layout.tp",
    "megatron.pipeline_model_parallel_size": "layout.pp",
    "megatron.context_parallel_size": "layout.cp",
    "megatron.virtual_pipeline_model_parallel_size": "layout.vpp",
    "megatron.enable_sequence_packing": "data.packed",
    "megatron.transformer_config.recompute_granularity": "train.recompute",
}


@dataclass(frozen=True)
class Guide:
    """A guide's title, the part of it that describes one training, and the configuration that has it."""

    title: str
    preset: str
    keys: Mapping[str, Target]
    errors: tuple[str, ...]
    begin: str = ""  # the part starts at this text, and ends at the text `end`; empty: the whole guide
    end: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)


GUIDES = (
    Guide(
        "Megatron: LoRA Fine-tuning GLM-4.7 (358B MoE)",
        "glm47-as-documented",
        GLM47_KEYS,
        (
            GRIDS,
            "32 GPUs at TP2 have dp 16, not 2: a global batch of 16 is one microbatch. The 2 is edp at etp 2",
            "etp is not in the guide. With etp 1 the experts alone take 84 GB of each GPU; the configuration has etp 2",
            "the configuration that runs is glm47: two pipeline stages, and experts that are not cut",
        ),
        left_out={"Data (DP)": "follows from the GPUs and the other degrees", "Gradient norms": "logging"},
    ),
    Guide(
        "Multi-Node GLM-4.7 Training with ms-swift on Modal",
        "glm47-b200",
        SWIFT_KEYS,
        (
            GRIDS,
            "GLM-4.7 has 160 routed experts and 1 shared one in 92 layers, 358B parameters and 700 GB in bf16; the "
            "guide says 60 experts and 50 GB",
            "32 GPUs at TP2 PP4 have dp 4, not 1: a global batch of 8 is 2 microbatches. EP4 holds 40 experts a rank",
            "N_NODES=2 works with any layout that divides both grids; it does not need 16 GPUs",
            "without optimizer and random states a checkpoint cannot resume; here both are saved",
        ),
    ),
    *(
        Guide(
            "Megatron SFT Training for MoE Models",
            preset,
            VERL_KEYS,
            (GRIDS, *errors, "torchrun --standalone cannot join several hosts; gang.engine starts them here"),
            begin=begin,
            end=end,
        )
        for preset, begin, end, errors in (
            (
                "deepseek-v3-64-as-documented",
                "### 1. DeepSeek-V3",
                "### 2.",
                ("TP1 PP16 EP32 needs etp 1 * ep 32 * pp 16 = 512 GPUs; the guide has 64. deepseek-v3-64 runs on 64",),
            ),
            (
                "qwen3-235b-as-documented",
                "### 2. Qwen3",
                "### 3.",
                (
                    "etp is open there, so Megatron takes tp: 4 * 4 * 8 = 128 GPUs, and there are 32. The model has "
                    "235B parameters. qwen3-235b runs on 32",
                ),
            ),
            (
                "mixtral-8x7b-as-documented",
                "### 3. Mixtral",
                "## ",
                ("the layout is legal with etp 2; mixtral-8x7b is faster",),
            ),
        )
    ),
    Guide(
        "Megatron-LM",
        "gpt2-large-as-documented",
        GPT2_KEYS,
        (
            "world size = TP x PP x CP x DP; the guide also multiplies EP",
            "the runs have 16 heads of 80; gpt2-large has 20 heads of 64. gpt2-large has the 20",
            "sequence parallel cuts activations over the tp ranks; it does not move them to the CPU",
            "the pipeline run has one microbatch, so each stage waits half of the time; train.micro_batch=8 helps",
            "the make target of sequence parallel is train-tp2-sq-gpt2-large-2gpu",
            "the runs were in fp16 with 16 skipped first steps; the configuration is in bf16",
            "the guide has six layouts; the result is the first one, and the configuration's file lists the others",
        ),
        begin="1. **Baseline**",
        end="1. **Data Parallel**",
    ),
    *(
        Guide(
            "Megatron-LM Integration for Oumi",
            preset,
            OUMI_KEYS,
            (
                GRIDS,
                "the guide's trainer is a placeholder: it computes no rewards and writes no checkpoint. The "
                "configuration trains on given answers; reinforce.steps adds GRPO",
                *errors,
            ),
            begin=begin,
            end=end,
        )
        for preset, begin, end, errors in (
            (
                "llama31-70b-as-documented",
                "### 1. Prepare Your Configuration",
                "### 2.",
                ("16 GPUs are two nodes, not one. All weights do not fit on them: llama31-70b runs with LoRA",),
            ),
            (
                "llama31-405b-as-documented",
                "**405B Model",
                "## References",
                (
                    "126 layers cannot be divided into 16 stages, or into 512 virtual ones: Megatron refuses it. "
                    "llama31-405b runs",
                    "Llama-4-405B does not exist; the configuration has Llama-3.1-405B",
                ),
            ),
        )
    ),
)


def _stack(guide: Guide) -> Stack:
    def recognises(source: Source) -> int:
        return 100 * (source.words == (guide.title, guide.preset))

    return Stack(
        name=f"guide-{guide.preset.removesuffix('-as-documented')}",
        title=f"the guide {guide.title}",
        kinds=("document",),
        recognises=recognises,
        keys=guide.keys,
        left_out=guide.left_out,
        defaults={},
        differences=guide.errors,
        extends=guide.preset,
    )


DOCUMENTS = tuple(map(_stack, GUIDES))
