"""Ask the reference of a training what it says of all its rows, once: the base's log-probabilities of both answers.

    python -m trainer.reference CONF [key=value ...]    on this host; CONF's layout says with how many processes
    torchrun ... -m trainer.reference RESOLVED.yaml     one of several hosts

Reads the base (trainer.convert) and the prepared rows (trainer.prepare) of a run whose train.objective is dpo. Writes
<paths.reference>/training.npy, validation.npy and, last, references.json, which says what they are of. Training then
needs no second model in memory. Nothing is done where they are there already.
"""

from pathlib import Path

from conf.schema.run import Run
from trainer.checks import inputs, places
from trainer.data import references
from trainer.megatron.recipe import load_only, make_config
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say


def main(given: Run) -> None:
    if references.is_made(given):
        say(f"reference: {given.paths.reference} is already there, of these rows and this base")
        return
    device.start()
    from trainer.megatron.model import open_bridge
    from trainer.patches import resharding
    from trainer.reference.scoring import Scoring
    from trainer.reinforcement.policy_step import Feed, FromOutside
    from trainer.training import bridge_loop

    resharding.install()
    run = _without_steps(given)
    with megatron_to(Path(run.paths.logs)):
        config = make_config(run, open_bridge(run), None)
        load_only(config)
        config.dataset = FromOutside.of(run, Feed())
        bridge_loop.train(run, config, _no_step, [Scoring(given)])


def _without_steps(run: Run) -> Run:
    """The run whose loop ends before its first step."""
    train = run.train.model_copy(update={"steps": 1, "epochs": None, "validate_every": 0})
    optimizer = run.optimizer.model_copy(update={"warmup_steps": 0, "warmup": None})
    checkpoint = run.checkpoint.model_copy(update={"save_every": 1})
    return run.model_copy(update={"train": train, "optimizer": optimizer, "checkpoint": checkpoint})


def _no_step(*_: object) -> None:
    raise AssertionError("nothing is trained")


if __name__ == "__main__":
    entry.start(main, inputs.check_reference, writes="reference", may_write=places.check_reference, gpus="reference")
