"""trainer.train, in which a rank's memory flips a bit, as flip.json in paths.output says.

what: weight (of its name, in the pass of a step), gradient (of its name, after the all-reduce of a step); step, ranks,
name and bit, from the lowest of the first element. For test_replicas.py.
"""

import functools
import json
from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    flip = json.loads(Path(run.paths.output, "flip.json").read_text())
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    import torch
    from megatron.core.utils import get_model_config, unwrap_model
    from torch import distributed

    from trainer import train
    from trainer.training.replicas import Replicas
    from trainer.weights.digests import INTEGERS

    begin = Replicas.on_train_start

    def change(context, of) -> None:
        step = context.state.train_state.step + 1
        if step != flip.get("step") or distributed.get_rank() not in flip["ranks"]:
            return
        for chunk in unwrap_model(context.model):
            for name, weight in chunk.named_parameters():
                if flip["name"] in name:
                    bits = of(weight).view(-1)[:1].view(INTEGERS[of(weight).element_size()])
                    bits ^= 1 << flip["bit"]
                    return
        raise AssertionError(flip["name"])

    def begin_and_flip(self, context) -> None:
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

    Replicas.on_train_start = begin_and_flip
    train.main(run)
