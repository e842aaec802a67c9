"""trainer.train, whose checkpoints compare the optimizer's states with those that megatron-core gathers."""

import os
from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from trainer import train
    from trainer.patches.checkpoints import divided_states

    gathered = DistributedOptimizer.sharded_param_state_fully_reshardable
    divided_states.install()
    divided_states.install, seen = lambda *copy: None, []
    divided = DistributedOptimizer.sharded_param_state_fully_reshardable

    def compared(self, model, is_loading=False, metadata=None):
        found = divided(self, model, is_loading, metadata)
        if is_loading:
            return found
        theirs = gathered(self, model, is_loading, metadata)
        apply_factories(theirs)
        whole = {}
        for tensor in nested_values(theirs):
            ends = [start + size for start, size in zip(tensor.global_offset, _sizes(tensor), strict=True)]
            whole.setdefault(tensor.key, []).append((tensor.global_offset, ends, tensor))
        for part in nested_values(found):
            sizes = part.local_shape
            for starts, ends, tensor in whole[part.key]:
                place = [at - start for at, start in zip(part.global_offset, starts, strict=True)]
                if all(at >= 0 for at in place) and all(
                    at + size <= end for at, size, end in zip(part.global_offset, sizes, ends, strict=True)
                ):
                    cut = tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True))
                    assert torch.equal(tensor.data.reshape(_sizes(tensor))[cut], part.data), part.key
                    assert tensor.global_shape == part.global_shape, part.key
                    seen.append(f"{part.key} {part.data.numel()}")
                    break
            else:
                raise AssertionError(f"{part.key}: outside the tensors of this rank")
        return found

    DistributedOptimizer.sharded_param_state_fully_reshardable = compared
    train.main(run)
    Path(run.paths.output, f"states-{os.environ['RANK']}.txt").write_text("\n".join(seen))


def _sizes(tensor) -> tuple[int, ...]:
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
