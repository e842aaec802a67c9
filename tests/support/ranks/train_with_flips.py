"""trainer.train, in which a rank's memory flips a bit, as flip.json in paths.output says.

what: loaded (weight, before the comparison with the checkpoint), weight (in a step), gradient (after its all-reduce) or
local (gradient of these passes, before the all-reduce; it grows: another bit in each); step, ranks, name, and bit of
the first element. For test_replicas.py and test_repeated_steps.py. Rank 0 writes the seconds of each comparison into
seconds.json.
"""

import functools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from conf.schema.run import Run


def main(run: Run) -> None:
    flip = json.loads(Path(run.paths.output, "flip.json").read_text())
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    import torch
    from megatron.core.utils import get_model_config, unwrap_model
    from torch import distributed

    from trainer import train
    from trainer.training import repeated_steps
    from trainer.training.replicas import Replicas
    from trainer.weights.digests import INTEGERS

    the = SimpleNamespace()
    verify, seconds = Replicas.verify, []

    def timed(self, *args) -> None:
        started = time.perf_counter()
        verify(self, *args)
        seconds.append(time.perf_counter() - started)

    begin, add_up, passes = Replicas.on_train_start, repeated_steps._sums, 0

    def change(context, of) -> None:
        step = context.state.train_state.step + 1
        if step != flip.get("step") or distributed.get_rank() not in flip["ranks"]:
            return
        for chunk in unwrap_model(context.model):
            for name, weight in chunk.named_parameters():
                if flip["name"] in name:
                    bits = of(weight).view(-1)[:1].view(INTEGERS[of(weight).element_size()])
                    bits ^= 1 << flip["bit"] + (passes if flip.get("grows") else 0)
                    return
        raise AssertionError(flip["name"])

    def flip_and_add_up(chunks):
        nonlocal passes
        step = the.context.state.train_state.step + 1
        passes += step == flip["step"]
        if flip["what"] == "local" and passes in flip["passes"]:
            change(the.context, lambda weight: weight.main_grad)
        return add_up(chunks)

    def begin_and_flip(self, context) -> None:
        the.context = context
        if flip.get("what") == "loaded":
            change(context, lambda weight: weight.data)
        config = get_model_config(context.model[0])
        finalize = config.finalize_model_grads_func

        @functools.wraps(finalize)  # Bridge writes its module into the checkpoint
        def flipped(*args, **kwargs) -> None:
            finalize(*args, **kwargs)
            if flip.get("what") == "weight":
                change(context, lambda weight: weight.data)
            if flip.get("what") == "gradient":
                change(context, lambda weight: weight.main_grad)

        config.finalize_model_grads_func = flipped
        with torch.no_grad():
            begin(self, context)

    Replicas.verify = timed
    Replicas.on_train_start, repeated_steps._sums = begin_and_flip, flip_and_add_up
    train.main(run)
    if os.environ["RANK"] == "0":
        Path(run.paths.output, "seconds.json").write_text(json.dumps(seconds))
