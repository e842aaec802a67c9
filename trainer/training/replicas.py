"""Compare weights and gradients of all data-parallel ranks, to find bits that a host's memory or network has changed.

Before the optimizer's step of every train.verify_every-th step, and at each checkpoint, each rank adds up the bits of
every weight, modulo 2^64. One changed bit always changes the sum:

    frozen weight                    equals its sum at the start of training, on the same rank
    any weight                       is equal on all ranks that hold it
    gradient after the all-reduce    is equal on all ranks, unless the optimizer is distributed: each rank has a part

One all-gather sends 8 bytes per tensor. If the sums differ, all ranks raise the same Fault. It names host, rank and
tensors, and tasks/gang/diagnosis leaves that host out. The majority is right. Of two replicas in bf16 or fp16, the one
that differs from the optimizer's fp32 copy is wrong; otherwise both are named, and none is left out.

A resumed training compares its weights with the digests in the checkpoint (trainer/weights/digests.py).

Not seen: a change that all ranks received alike; the optimizer's state; weights that Transformer Engine keeps in FP8.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateUsage=false

import functools
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config, unwrap_model
from torch import distributed, nn

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.hosts.host_verdict import Misfit, unique
from trainer.megatron.packed_base.weight import PackedWeight
from trainer.megatron.recipe import checkpoint_folder
from trainer.training.gradients import stepped
from trainer.weights import atomic_folder, digests, model_digests
from trainer.weights.released import enumerate_names

CHECK = "corruption"  # first word of the lines, for tasks/gang/diagnosis/classify.py


@dataclass(frozen=True)
class Held:
    """A weight of this rank, and the group of ranks that hold the same one."""

    name: str
    weight: nn.Parameter
    group: Any

    @property
    def is_frozen(self) -> bool:
        return not self.weight.requires_grad


class Replicas(Callback):
    def __init__(self, run: Run, start: int):
        self.every, self.start, self.folder = run.train.verify_every, start, checkpoint_folder(run)
        self.gradients = not run.optimizer.distributed

    def on_train_start(self, context: Any) -> None:
        self.context = context
        chunks = enumerate(unwrap_model(context.model))
        weights = [(f"{number}:{name}", one) for number, chunk in chunks for name, one in chunk.named_parameters()]
        self.held = [Held(name, one, _group(one)) for name, one in weights if _tensors(one)]
        self.loaded = sum_of_each(self.held)
        self._compare(self.loaded, self.held, self.start)
        if self.start:
            _compare_with_checkpoint(context, checkpoints.step_folder(self.folder, self.start))
        if self.every:
            config = get_model_config(context.model[0])
            config.finalize_model_grads_func = self._after(config.finalize_model_grads_func)

    def on_checkpoint_save(self, context: Any) -> None:
        self.verify(context.state.train_state.step)

    def verify(self, step: int, gradients: bool = False) -> None:
        """Raise a Fault on all ranks if a weight has changed on one of them. All ranks must call it."""
        sums, held = sum_of_each(self.held), self.held
        if gradients:
            of_gradients = [replace(one, name=f"gradient of {one.name}") for one in held if not one.is_frozen]
            sums = torch.cat(
                [sums, torch.stack([digests.sum_of_words([one.weight.main_grad]) for one in of_gradients])]
            )
            held = [*held, *of_gradients]
        self._compare(sums, held, step)

    def _after(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """Wrap the end of a step's passes, after which the gradients of all ranks are summed."""

        @functools.wraps(finalize)
        def finalize_and_verify(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            step = self.context.state.train_state.step + 1
            if step % self.every == 0:
                self.verify(step, self.gradients)

        return finalize_and_verify

    def _compare(self, sums: torch.Tensor, held: list[Held], step: int) -> None:
        frozen = torch.tensor([one.is_frozen for one in self.held], device=sums.device)
        changed = (sums[: len(self.held)] != self.loaded) & frozen
        differ, tables = changed.any(), []
        for group in dict.fromkeys(one.group for one in held):  # in the same order on all ranks
            places = [place for place, one in enumerate(held) if one.group is group]
            table = torch.empty(group.size() * len(places), dtype=torch.int64, device=sums.device)
            distributed.all_gather_into_tensor(table, sums[places], group=group)
            table = table.view(group.size(), -1)
            differ = differ | (table != table[0]).any()
            tables.append((group, places, table))
        flag = differ.to(torch.int64).reshape(1)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        if flag.item():
            own = [one.name for one, is_changed in zip(self.held, changed.tolist(), strict=True) if is_changed]
            raise Fault("\n".join(self._lines(tables, held, own, step)))

    def _lines(self, tables: list[Any], held: list[Held], own: list[str], step: int) -> list[str]:
        wrong, unclear = {distributed.get_rank(): own}, dict[tuple[int, ...], list[str]]()
        differs = _differ_from_main(self.context.optimizer, self.held)
        for group, places, table in tables:
            ranks = tuple(distributed.get_process_group_ranks(group))
            for place, sums in zip(places, table.T.tolist(), strict=True):
                name = held[place].name
                if len({*sums}) == 1 or (held[place].is_frozen and step != self.start):
                    continue  # a frozen weight is compared with its own sum
                usual, count = Counter(sums).most_common(1)[0]
                odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != usual]
                if 2 * count <= len(sums):
                    of_copy = [rank for rank in ranks if (rank == distributed.get_rank()) == differs.get(name)]
                    odd = of_copy if name in differs and len(ranks) == 2 else []
                for rank in odd:
                    wrong.setdefault(rank, []).append(name)
                if not odd:
                    unclear.setdefault(ranks, []).append(name)
        return lines(step, wrong, unclear)


def lines(
    step: int, wrong: dict[int, list[str]], unclear: dict[tuple[int, ...], list[str]], of_one_host: bool = False
) -> list[str]:
    """Lines about what all ranks have found. All ranks must call it.

    `wrong` has names of tensors by rank, `unclear` those by groups of ranks with one wrong rank. With `of_one_host`,
    wrong ranks on several hosts follow from one of them, and no host is left out.
    """
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    gathered = atomic_folder.gather((wrong, unclear, socket.gethostname()))
    hosts, result = unique([host for *_, host in gathered][::each]), []
    found: dict[int, set[str]] = {}
    for of_rank, _, _ in gathered:
        for rank, names in of_rank.items():
            found.setdefault(rank, set()).update(names)
    found = {rank: names for rank, names in sorted(found.items()) if names}
    leave_out = not of_one_host or len({rank // each for rank in found}) == 1
    for rank, names in found.items():
        what = f"step {step}: bits have changed: {enumerate_names(sorted(names), 3)}"
        result.append(Misfit(hosts[rank // each], what, leave_out, rank).report(rank // each, CHECK))
    if not result:
        suspects = {ranks: names for _, of_rank, _ in gathered for ranks, names in of_rank.items()}
        for ranks, names in sorted(suspects.items()):
            what = f"step {step}: differs from {' and '.join(f'rank {rank}' for rank in ranks[1:])}, "
            what += f"and no other rank can decide: {enumerate_names(sorted(names), 3)}"
            result.append(Misfit(hosts[ranks[0] // each], what, False, ranks[0]).report(ranks[0] // each, CHECK))
    return result


def sum_of_each(held: list[Held]) -> torch.Tensor:
    return torch.stack([digests.sum_of_words(_tensors(one.weight)) for one in held])


def _tensors(weight: nn.Parameter) -> list[torch.Tensor]:
    """Tensors that have the bits of a weight; empty for a part of another weight's codes, and for FP8."""
    if isinstance(weight, PackedWeight):
        return [one for one in vars(weight.store).values() if isinstance(one, torch.Tensor)] if weight.leads else []
    return [weight.data] if type(weight) is nn.Parameter and weight.numel() else []


def _group(weight: nn.Parameter) -> Any:
    if getattr(weight, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


@torch.no_grad()
def _differ_from_main(optimizer: Any, held: list[Held]) -> dict[str, bool]:
    """Whether weights differ from the fp32 copy with which this rank made all of their values."""
    names, result = {id(one.weight): one.name for one in held}, {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight, main in stepped(part):
            if main is None or main.dtype == weight.dtype or id(weight) not in names:
                continue
            values = weight.detach().reshape(-1)
            if isinstance(part, DistributedOptimizer):
                span = part._get_model_param_range_map(weight)["param"]
                values = values[span.start : span.end]
            differs = not torch.equal(values, main.reshape(-1).to(values.dtype))
            if differs or values.numel() == weight.numel():
                result[names[id(weight)]] = differs
    return result


def _compare_with_checkpoint(context: Any, folder: Path) -> None:
    saved = digests.read(folder)
    if not saved:
        return
    (loaded, *_) = atomic_folder.gather(model_digests.of_model(context.model, context.state.cfg.peft))
    if other := sorted(name for name, digest in loaded.items() if saved["digests"].get(name, digest) != digest):
        text = f"{len(other)} loaded tensors differ from those that were saved: {enumerate_names(other, 3)}"
        raise Fault(f"{folder}: {text}")
