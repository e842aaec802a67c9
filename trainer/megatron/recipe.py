"""A run's configuration as Megatron-Bridge's ConfigContainer, with all settings that differ from defaults."""

# pyright: reportArgumentType=false

import logging
import math
from pathlib import Path

from conf.rules import batch_ramp, chunked_loss, schedule
from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron import precision
from trainer.megatron.model import make_provider
from trainer.startup import device
from trainer.startup.console import say


def checkpoint_folder(run: Run) -> Path:
    return Path(run.paths.output) / "checkpoints"


def last_step(run: Run) -> int:
    steps = schedule.last_step(run)
    assert steps is not None, "checks.inputs.check_train counts the steps first"
    return steps


def make_config(run: Run, bridge, resume_step: int | None):
    """Return the whole configuration of a training run that starts fresh or resumes from a complete checkpoint."""
    from megatron.bridge.training import config

    from trainer.megatron.parameter_groups import parameter_groups
    from trainer.megatron.sequences import make_dataset
    from trainer.patches import batch_ramp as ramp
    from trainer.patches import joined_packs, packed_positions, wide_heads
    from trainer.patches.gradients import chunked_losses, token_count

    train, optimizer, checkpoint = run.train, run.optimizer, run.checkpoint
    precision.prepare(run, resume_step is not None)
    dataset = make_dataset(run)
    if train.micro_batch > 1 and getattr(dataset, "enable_offline_packing", False):  # rows, not texts
        joined_packs.install(train.micro_batch)
    if run.data.packed:
        packed_positions.install()
    if chunked_loss.is_chunked(run):
        chunked_losses.install()
    if device.has_gpu():
        wide_heads.install()
    if train.batch_ramp:
        ramp.install(" ".join(f"{start}:{size}" for start, size in batch_ramp.sizes(train)))
    if device.has_gpu() and token_count.helps(run):
        token_count.install()
    folder = str(checkpoint_folder(run))
    return config.ConfigContainer(
        model=make_provider(run, bridge),
        peft=make_adapter(run),
        train=config.TrainingConfig(
            train_iters=last_step(run),
            global_batch_size=train.global_batch,
            micro_batch_size=train.micro_batch,
            exit_signal_handler=True,  # SIGTERM announces preemption: save, then exit
            manual_gc=True,  # all ranks collect garbage at the same step
            manual_gc_interval=100,
        ),
        validation=config.ValidationConfig(
            eval_interval=train.validate_every or None, eval_iters=train.validate_batches if train.validate_every else 0
        ),
        optimizer=config.OptimizerConfig(
            optimizer="adam" if optimizer.kind == "adamw" else "muon",
            muon_tp_mode="duplicated",  # updates whole matrices: the same at any layout
            muon_extra_scale_factor=0.2,  # updates as large as AdamW's: same learning rates (Liu et al. 2025)
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            use_distributed_optimizer=optimizer.distributed,
            **precision.optimizer_settings(run),
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style=optimizer.decay,
            # Bridge counts both in sequences of whole batches; steps of a ramp have fewer.
            lr_warmup_iters=batch_ramp.whole_batches(train, optimizer.warmup_steps),
            lr_decay_iters=batch_ramp.whole_batches(train, train.steps),
            start_weight_decay=optimizer.weight_decay,
            end_weight_decay=optimizer.weight_decay,
            override_opt_param_scheduler=True,
        ),
        ddp=config.DistributedDataParallelConfig(
            check_for_nan_in_grad=train.precision != "fp16",  # fp16 skips steps that overflow
            grad_reduce_in_fp32=optimizer.gradients == "fp32",
            use_distributed_optimizer=optimizer.distributed,
            average_in_collective=False,  # with a loss per token the division is last
        ),
        dataset=dataset,
        tokenizer=config.TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=run.paths.model,
            hf_tokenizer_kwargs={"trust_remote_code": run.model.trust_remote_code},
        ),
        logger=config.LoggerConfig(
            log_interval=run.log.every,
            skip_train_metrics_log=True,  # trainer/training/metrics.py writes them, with fewer synchronisations
            logging_level=logging.ERROR,
        ),
        checkpoint=config.CheckpointConfig(
            pretrained_checkpoint=run.paths.base,
            save=folder,
            load=folder if resume_step else None,
            ckpt_step=resume_step,
            save_interval=checkpoint.save_every,
            save_optim=checkpoint.save_optimizer,
            save_rng=checkpoint.save_optimizer,
            load_optim=checkpoint.save_optimizer,
            load_rng=checkpoint.save_optimizer and _has_random_states(run, resume_step),
            # Optimizer states by parameter, not by rank: training can resume at any layout.
            dist_ckpt_optim_fully_reshardable=True,
        ),
        rng=config.RNGConfig(seed=train.seed),
        dist=config.DistributedInitConfig(distributed_backend=device.backend()),
        mixed_precision=precision.mixed_precision(run),
        **parameter_groups(run),
        # Bridge would check each micro batch's loss twice and wait for the GPU each time. A NaN loss gives NaN
        # gradients, which ddp checks once per step; trainer/training/metrics.py checks the step's loss.
        rerun_state_machine=config.RerunStateMachineConfig(check_for_nan_in_loss=False),
    )


def load_only(config) -> None:
    """Change a training configuration into one that loads its checkpoint and takes no step."""
    config.validation.skip_train, config.validation.eval_iters = True, 0
    config.dataset.do_validation = False
    config.checkpoint.load_optim = config.checkpoint.load_rng = False
    config.checkpoint.save = None


def make_adapter(run: Run):
    """Return LoRA or DoRA; None for full fine-tuning."""
    adapter = run.adapter
    if adapter.kind == "none":
        return None
    shared = {
        "target_modules": list(adapter.names),
        "dim": adapter.rank,
        # Bridge divides alpha by the rank.
        "alpha": adapter.alpha * math.sqrt(adapter.rank) if adapter.rslora else adapter.alpha,
        "dropout": adapter.dropout,
        "seed": run.train.seed,
        "init": adapter.init,
    }
    from trainer.megatron.adapters import DoRA, LoRA

    if adapter.kind == "dora":
        return DoRA(**shared)
    return LoRA(**shared, share_expert_adapters=adapter.experts == "shared", lean=adapter.lean)


def _has_random_states(run: Run, resume_step: int | None) -> bool:
    if not resume_step:
        return False
    from trainer.patches import resharding

    present = resharding.has_random_states(checkpoints.step_folder(checkpoint_folder(run), resume_step), run.layout)
    if not present:
        say("train: the checkpoint has no random states for this layout: dropout continues with new ones")
    return present
