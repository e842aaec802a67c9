"""Reinforce answers with high rewards: GRPO and similar methods, with Megatron-Bridge's loop and vLLM.

    python -m trainer.reinforce CONF [key=value ...]    on this host; CONF's layout sets the number of processes
    torchrun ... -m trainer.reinforce RESOLVED.yaml     one of several hosts; the first one runs vLLM or connects to it

Starts from the newest checkpoint of trainer.train in paths.output, or from the base (reinforce.start), with prompts of
prepared data: paths.prompts if reinforce.source is set, else paths.data. Writes <paths.reinforced>/checkpoints, which
trainer.export reads as paths.output, next to it metrics.jsonl and parity.json, and a journal of all answers in
<paths.reinforced>/rollouts. A run killed at any moment resumes at the next start and repeats no answers.
"""

import os
from pathlib import Path

from conf.rules.reinforcement import as_training
from conf.schema.run import Run
from contract import checkpoints
from trainer import preflight
from trainer.checks import inputs, places
from trainer.megatron.recipe import checkpoint_folder, last_step, make_config
from trainer.reinforcement.rollouts import Rollouts
from trainer.startup import device, entry, heartbeat
from trainer.startup.console import megatron_to, say
from trainer.training import resume


def main(configured: Run) -> None:
    run = as_training(configured)
    folder = checkpoint_folder(run)
    newest = max(checkpoints.complete_steps(folder), default=0)
    if newest >= last_step(run):
        place = checkpoints.step_folder(folder, newest)
        say(f"reinforce: step {newest} of {last_step(run)} already exists: {place}")
        return
    is_first = os.environ["RANK"] == "0"
    if is_first:
        for name in checkpoints.remove_incomplete(folder):
            say(f"reinforce: removed {folder / name}, left over from an interrupted save")
        resume.report_changes(run, folder)
    if run.layout.nodes > 1 and run.gang.preflight and "GANG_ATTEMPT" in os.environ:
        preflight.main(run)
    rollouts = Rollouts(run) if is_first else None  # vLLM loads the model while Megatron does
    try:
        _train(configured, run, rollouts, newest)
    finally:
        if rollouts:
            rollouts.close()


def _train(configured: Run, run: Run, rollouts: Rollouts | None, newest: int) -> None:
    """Train from the newest checkpoint's step on."""
    device.start()
    from trainer.megatron.model import open_bridge
    from trainer.reinforcement.journal import Journal, facts
    from trainer.reinforcement.loop import Reinforcement
    from trainer.reinforcement.policy.policy_step import FromOutside
    from trainer.training.bridge_loop import train
    from trainer.training.mark_checkpoints import MarkCheckpoints
    from trainer.training.metrics import Metrics
    from trainer.training.parity import Parity
    from trainer.training.replicas import Replicas

    if rollouts:
        Journal(Path(run.paths.output)).begin(facts(configured))
    with megatron_to(Path(run.paths.logs)):
        bridge = open_bridge(run)
        config = make_config(run, bridge, newest or None)
        _switch_dropout_off(config)
        from_training = not newest and run.reinforce.start == "trained"
        if from_training:
            _load_trained(config.checkpoint, checkpoint_folder(configured))
        metrics = Metrics(run, Path(run.paths.output) / "metrics.jsonl", newest)
        steps = Reinforcement(run, bridge, rollouts, metrics, from_training)
        config.dataset = FromOutside.of(run, steps.feed)
        callbacks = [Replicas(run, newest), steps, metrics, Parity(run), MarkCheckpoints(run, metrics)]
        callbacks += [heartbeat.callback(), steps.feed]
        train(run, config, steps.policy_step, callbacks)


def _switch_dropout_off(config) -> None:
    """Train without the dropout of a release's config.json, and without an adapter's.

    vLLM samples without dropout, and answers' earlier log-probabilities have none; a policy with dropout would differ
    from both by noise.
    """
    config.model.hidden_dropout = config.model.attention_dropout = 0.0
    if config.peft is not None:
        config.peft.dropout = 0.0


def _load_trained(checkpoint, folder: Path) -> None:
    """Make Bridge load a training's last weights, without its optimizer and random states. They were checked before."""
    checkpoint.load, checkpoint.ckpt_step = str(folder), checkpoints.complete_steps(folder)[-1]
    checkpoint.load_optim = checkpoint.load_rng = False


if __name__ == "__main__":
    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="reinforce")
