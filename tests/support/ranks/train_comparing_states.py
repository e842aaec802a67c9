"""trainer.train, whose checkpoints compare the exchanged states of the optimizer with those of megatron-core."""

# pyright: reportFunctionMemberAccess=false, reportIndexIssue=false

import os
from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from trainer import train
    from trainer.patches.checkpoints import exchanged_states

    exchanged_states.install()
    exchange, ours = exchanged_states.exchange, DistributedOptimizer.get_parameter_state_dp_zero
    exchanged_states.exchange = lambda own, whole, group: exchange(own, whole, group, piece=10_001)
    seen = []

    def compared(self, *args, **kwargs):
        found = ours(self, *args, **kwargs)
        if not kwargs.get("empty_data"):
            theirs = ours.__wrapped__(self, *args, **kwargs)
            assert found.keys() == theirs.keys()
            for index in theirs.keys() - {"buckets_coalesced"}:
                for kind, states in theirs[index].items():
                    for key, state in states.items():
                        same = torch.equal if isinstance(state, torch.Tensor) else int.__eq__
                        assert same(state, found[index][kind][key]), key
                        seen.append(key)
        return found

    compared.__wrapped__ = ours.__wrapped__
    DistributedOptimizer.get_parameter_state_dp_zero = compared
    train.main(run)
    Path(run.paths.output, f"states-{os.environ['RANK']}.txt").write_text(" ".join(seen))
