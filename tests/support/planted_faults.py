"""A reinforcement learning where weights go over wrongly in every step, once in each way, and then as they should.

    python -m tests.support.planted_faults CONF [key=value ...]     writes <paths.reinforced>/planted.jsonl as well

Each fault is planted where vLLM has the weights of the version before, and has been asked the probe's rows with them.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer import reinforce
from trainer.checks import inputs, places
from trainer.startup import entry

Tensors = list[tuple[str, Any]]


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()
    from trainer.reinforcement.steps.weights import Weights

    whole = Weights.send

    def transfer(self: Any, context: Any, version: int) -> None:
        before = getattr(self, "_before", None)
        if before:
            for name, plant in FAULTS.items():
                _go_back(self, *before)
                previous, told = self.previous, None
                try:
                    plant(self, lambda: whole(self, context, version), random.Random(version))
                except Fault as fault:
                    told = str(fault)
                    if told.startswith("rollout: "):  # vLLM's process has said so, and is about to end
                        self.sampler.rollouts.engines[0].wait()
                self.previous = previous
                line = {"fault": name, "version": version, "told": told}
                with (Path(run.paths.reinforced) / "planted.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            _go_back(self, *before)
        whole(self, context, version)
        self._before = [(name, tensor.clone()) for name, tensor in self.tensors(context)], version

    Weights.send = transfer
    reinforce.main(run)


def _go_back(self: Any, tensors: Tensors, version: int) -> None:
    """Have vLLM as it was with the version before, in a new process where a fault has ended it."""
    if self.sampler.rollouts.engines[0].is_gone():
        from trainer.reinforcement.rollouts import Rollouts

        self.sampler.rollouts.close()
        self.sampler.rollouts = Rollouts(self.run)
    self.sampler.rollouts.update(iter(tensors), version)
    self.sampler.rollouts.begin()
    self.sampler.probe(self.probe_rows)


def _no_sync(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    _with(self.sampler.rollouts, "update", lambda tensors, version, export: len(list(tensors)), transfer)


def _old(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    """The weights of the version before, under the number of this one."""
    tensors, _ = self._before
    _with(self, "tensors", lambda context: iter(tensors), transfer)


def _left_out(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    place = draw.randrange(len(self._before[0]))
    _with(self, "tensors", _changed(self.tensors, lambda found: found[:place] + found[place + 1 :]), transfer)


def _not_reset(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    each = self.sampler.rollouts.each
    _with(
        self.sampler.rollouts, "each", lambda name, **given: None if name == "forget" else each(name, **given), transfer
    )


def _flipped(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    """One bit is flipped on the way."""
    from trainer.reinforcement.transfer.wire import Pipe

    send = Pipe.send

    def flipped(pipe: Pipe, tensor: Any) -> None:
        tensor[draw.randrange(len(tensor))] ^= 1 << draw.randrange(8)
        send(pipe, tensor)

    _with(Pipe, "send", flipped, transfer)


def _other_template(self: Any, transfer: Callable[[], None], draw: random.Random) -> None:
    """The engine puts a token in front of each prompt that is to be answered, as a chat template would."""
    each = self.sampler.rollouts.each

    def answer(name: str, **given: Any) -> Any:
        if name == "answer":
            given["prompts"] = [[7, *prompt] for prompt in given["prompts"]]
        return each(name, **given)

    _with(self.sampler.rollouts, "each", answer, transfer)


def _changed(weights: Callable[[Any], Iterator], change: Callable[[Tensors], Tensors]) -> Callable[[Any], Iterator]:
    return lambda context: iter(change(list(weights(context))))


def _with(owner: Any, name: str, planted: Any, run: Callable[[], None]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, planted)
    try:
        run()
    finally:
        setattr(owner, name, original)


FAULTS = {
    "no sync": _no_sync,
    "an old version": _old,
    "one tensor left out": _left_out,
    "prefix cache not reset": _not_reset,
    "another template": _other_template,
    "a flipped byte": _flipped,
}

if __name__ == "__main__":
    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="train")
