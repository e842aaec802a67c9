"""Patch: resume the optimizer at a layout other than the saved one.

Megatron has one optimizer for dense weights and, if experts are cut differently, a second one for experts. Their number
depends on the layout, and on whether a pipeline stage holds experts at all. Its checkpoints store tensors by parameter,
independent of that, but learning rate and step number by optimizer, from the first rank: a change from ep=1 to ep=2
ends in "Expected 2 entries in state dict, but got 4". install() gives each optimizer the saved settings of the matching
parameter group. Remove when ChainedOptimizer.load_state_dict does:
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/optimizer.py

Random states are cut by pipeline and tensor ranks, and with ep > 1 by all ranks. Megatron-Bridge loads them whenever pp
and tp equal the checkpoint's, and at another ep ends in "Missing key in checkpoint state_dict: rng_state/shard_...".
has_random_states() checks in advance whether they exist. Remove when its load_checkpoint also compares ep:
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/checkpointing.py
"""

from pathlib import Path

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import FileSystemReader

from conf.schema.sections import Layout
from trainer.patches import versions


def install() -> None:
    """Give each optimizer of a chain its own saved settings."""
    versions.check(__name__)
    original = ChainedOptimizer.load_state_dict

    def load_state_dict(self, state_dict) -> None:
        chain = self.chained_optimizers
        if not all(isinstance(optimizer, DistributedOptimizer) for optimizer in chain):
            return original(self, state_dict)
        for optimizer, part in zip(chain, _parts(state_dict, len(chain)), strict=True):
            optimizer.load_state_dict(_with_settings(part, optimizer, state_dict))
        if len(chain) > 1:
            self._synchronize_steps()

    ChainedOptimizer.load_state_dict = load_state_dict


def has_random_states(folder: Path, layout: Layout) -> bool:
    """Whether a checkpoint has random states for the ranks of this layout."""
    shape = [layout.pp, layout.tp]
    if layout.ep > 1:
        shape.append(layout.world // (layout.pp * layout.tp))
    name = f"rng_state/shard_{'.'.join('0' for _ in shape)}_{'.'.join(map(str, shape))}"
    return name in FileSystemReader(folder).read_metadata().state_dict_metadata


def _parts(state_dict: dict, count: int) -> list[dict]:
    """Return the tensors of each optimizer of this rank."""
    if count > 1:
        return [state_dict[i] for i in range(count)]
    return [{key: value for key, value in state_dict.items() if not isinstance(key, int)}]


def _with_settings(part: dict, optimizer, state_dict: dict) -> dict:
    saved = [value for key, value in state_dict.items() if isinstance(key, int) and "optimizer" in value]
    saved = saved or [state_dict]
    groups = [group for state in saved for group in state["optimizer"]["param_groups"]]
    whole = {key: value for key, value in saved[0].items() if not isinstance(key, int) and key != "param_state"}
    mine = [_matching(group, groups) for group in optimizer.optimizer.param_groups]
    return {**whole, **part, "optimizer": {**whole["optimizer"], "param_groups": mine}}


def _matching(group: dict, saved: list[dict]) -> dict:
    """Return the saved settings for this group; an expert group without saved settings gets those of a dense group."""

    def alike(other: dict) -> tuple:
        return tuple(other.get(key) == group.get(key) for key in ("wd_mult", "lr_mult", "max_lr", "is_expert_parallel"))

    best = max(saved, key=alike)
    assert alike(best)[:2] == (True, True), f"no saved parameter group with the multipliers of {group.keys()}"
    return {**best, "is_expert_parallel": group.get("is_expert_parallel", False)}
