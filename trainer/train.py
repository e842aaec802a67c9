"""Train an adapter, or every weight, with Megatron-Bridge's loop; resume from the newest complete checkpoint.

    python -m trainer.train CONF [key=value ...]        on this host; CONF's layout sets the number of processes
    torchrun ... -m trainer.train RESOLVED.yaml         one of several hosts

Reads the converted model (trainer.convert) and the token files in paths.data (trainer.prepare). If there is only a
training.jsonl written by hand, it is prepared first, into <paths.output>/data. Writes <paths.output>/checkpoints and,
from rank 0, <paths.output>/metrics.jsonl and paths.parity. SIGTERM saves a checkpoint and ends; the next start resumes.
"""

import os
from pathlib import Path

from conf.rules import schedule
from conf.schema.run import Run
from contract import checkpoints
from trainer import preflight
from trainer.checks import attention, inputs, places
from trainer.megatron.recipe import checkpoint_folder, last_step, load_only, make_config
from trainer.profiling.recorder import recorder
from trainer.serving import agreement
from trainer.startup import device, entry, heartbeat
from trainer.startup.console import megatron_to, say
from trainer.training import bridge_loop, resume


def main(run: Run) -> None:
    folder = checkpoint_folder(run)
    done = checkpoints.complete_steps(folder)
    mark = checkpoints.read_mark(checkpoints.step_folder(folder, done[-1])) if done else None
    finished = mark is not None and schedule.is_over(run, done[-1], mark)
    if finished:
        say(f"train: step {done[-1]} of {last_step(run)} already exists: {checkpoints.step_folder(folder, done[-1])}")
        if agreement.is_recorded(run, done[-1]):
            return
    if os.environ["RANK"] == "0":
        for name in checkpoints.remove_incomplete(folder):
            say(f"train: removed {folder / name}, left over from an interrupted save")
        resume.report_changes(run, folder)

    device.start()
    if run.gang.preflight and "GANG_ATTEMPT" in os.environ:
        preflight.main(run)
    from trainer import objectives
    from trainer.megatron import next_batch
    from trainer.megatron.model import open_bridge
    from trainer.megatron.next_batch import NextBatch
    from trainer.training.learning_check import LearningCheck
    from trainer.training.loss_scaling import LossScaling
    from trainer.training.mark_checkpoints import MarkCheckpoints
    from trainer.training.metrics import Metrics
    from trainer.training.packing_cost import PackingCost
    from trainer.training.parity import Parity
    from trainer.training.repeated_steps import RepeatedSteps
    from trainer.training.replicas import Replicas
    from trainer.training.validations import Validations
    from trainer.training.weight_means import WeightMeans
    from trainer.weights import starting_adapter

    start = done[-1] if done else 0
    heartbeat.account(Path(run.paths.output), start)
    with megatron_to(Path(run.paths.logs)):
        bridge = open_bridge(run)
        config, forward_step = make_config(run, bridge, start or None), objectives.step(run)
        attention.check(run, config.model)
        if finished:
            load_only(config)
            callbacks = [Parity(run)]
        else:
            if run.model.adapter and not start:
                starting_adapter.install(config, run, bridge)
            metrics = Metrics(run, Path(run.paths.output) / "metrics.jsonl", start)
            validations = Validations(run, metrics, start)
            means = WeightMeans(run, start) if run.train.ema_decay else None
            callbacks = [Replicas(run, start), metrics, LearningCheck(run, metrics), validations]
            callbacks += [means] if means else []
            callbacks += [PackingCost(run, metrics)] if run.model.base != "bf16" and not start else []
            callbacks += [
                Parity(run, validations, means),
                MarkCheckpoints(run, metrics, validations),
                heartbeat.callback(),
            ]
            callbacks += [recorder(run)] if run.log.profile_every else []
            callbacks += [LossScaling()] if run.train.precision == "fp16" else []
            callbacks += [RepeatedSteps(run, metrics)] if run.train.repeat_every else []
            callbacks += [NextBatch()] if next_batch.helps(run) else []
            forward_step = metrics.gradients.watch(forward_step)
        bridge_loop.train(run, config, forward_step, callbacks)


if __name__ == "__main__":
    entry.start(main, inputs.check_train, writes="output", may_write=places.check_train, gpus="train")
