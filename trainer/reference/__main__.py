"""Score all rows of a training once with another model: the base for dpo, the teacher for distill.

    python -m trainer.reference CONF [key=value ...]    on this host; CONF's layout says with how many processes
    torchrun ... -m trainer.reference RESOLVED.yaml     one of several hosts

Reads the prepared rows (trainer.prepare), and the base in paths.base or the teacher in paths.teacher and, converted,
paths.teacher_base (python -m trainer.convert CONF paths.model=TEACHER paths.base=TEACHER_BASE). Writes the files that
trainer/data/references.py describes into paths.reference, which all hosts see. Training then needs no second model in
memory. If the files exist, the command changes nothing; after a kill it continues with the missing rows.
"""

import os
from pathlib import Path

from conf.rules import objectives, schedule
from conf.schema.run import Run
from trainer.checks import inputs, places
from trainer.data import references
from trainer.megatron.recipe import load_only, make_config
from trainer.reference import parts
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say


def main(configured: Run) -> None:
    if references.is_made(configured):
        say(f"reference: {configured.paths.reference} already has the scores of these rows by this base")
        if os.environ.get("RANK", "0") == "0":
            parts.end(Path(configured.paths.reference))  # left if the command was killed after its last line
        return
    device.start()
    from trainer.megatron.model import open_bridge
    from trainer.reference.scoring import Scoring
    from trainer.reinforcement.policy.policy_step import Feed, FromOutside
    from trainer.training import bridge_loop
    from trainer.weights import starting_adapter

    if objectives.has_teacher(configured):
        inputs.check_tokens(configured)
    run = schedule.of_steps(objectives.as_asked(configured), 1)  # the loop ends before its first step
    with megatron_to(Path(run.paths.logs)):
        bridge = open_bridge(run)
        config = make_config(run, bridge, None)
        if objectives.has_starting_adapter(configured):
            starting_adapter.install(config, configured, bridge)
        load_only(config)
        config.dataset = FromOutside.of(run, Feed())
        bridge_loop.train(run, config, _no_step, [Scoring(configured)])


def _no_step(*_: object) -> None:
    raise AssertionError("nothing is trained")


if __name__ == "__main__":
    entry.start(main, inputs.check_reference, writes="reference", may_write=places.check_reference, gpus="reference")
