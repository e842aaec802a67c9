"""Count what goes between ranks in one step of a run, by torch's operations: how often, and bytes.

The answer has small and large ones of each kind: those below and above BOUND bytes, of which an activation has more and
what is of an adapter's rank less.
"""

import contextlib
import json
from collections import Counter
from pathlib import Path

from conf.schema.run import Run

BOUND = 20_000


def main(run: Run) -> None:
    from tests.support.ranks import gradients_of_run

    gradients_of_run.start(run)
    import torch
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainer.megatron.model import open_bridge
    from trainer.megatron.recipe import make_config

    counts, sizes = Counter(), Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                size = max(one.nbytes for one in _tensors(args))
                kind = f"{func.__name__.partition('.')[0].strip('_')} {'large' if size > BOUND else 'small'}"
                counts[kind] += 1
                sizes[kind] += size
            return func(*args, **(kwargs or {}))

    class Counted(Callback):
        """Counts in the second step alone: the first has what is done once."""

        def on_train_step_start(self, context) -> None:
            self.mode = Count() if context.state.train_state.step == 1 else contextlib.nullcontext()
            self.mode.__enter__()

        def on_train_step_end(self, context) -> None:
            self.mode.__exit__(None, None, None)

    config = make_config(run, open_bridge(run), None)
    config.checkpoint.save = None
    finetune(config, forward_step, callbacks=[Counted()])
    if torch.distributed.get_rank() == 0:
        (Path(run.paths.output) / "answer.json").write_text(json.dumps({"counts": counts, "bytes": sizes}))


def _tensors(values):
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
