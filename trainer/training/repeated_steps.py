"""Compute steps twice, the first time with the batches of another data-parallel rank (train.repeat_every).

These are every n-th step, and the steps that save a checkpoint: a rank that always computes wrong is found before.

    pass 1    rank r has the batches of rank r + shift; the bits of its gradient are added up, and nothing is reduced
    pass 2    the step as usual; before the all-reduce the bits are added up too
    pass 3    only if two sums of the same batches differ: as pass 2, to see who repeats its result

The sums are digests.sum_of_words(), of each gradient of a rank. With deterministic kernels they are
equal for the same batches on all ranks. A rank that does not repeat its own result is wrong. If a rank differs from
two equal results of the owner of its batches, it is wrong, unless the owner also differs from a third rank. Of two
replicas that both repeat their results, both are named, and none is left out. A wrong replica on several hosts is
named, too, but not left out. After a difference, the optimizer takes no step.

With experts on several ranks, `shift` skips the ranks that share experts, because these see each other's tokens. If it
leads back to the same rank, that rank repeats its own batches, which does not find a rank that is always wrong.

The training stays the same to the last bit, except with delayed scaling of FP8. If more than half of the replicas do
not repeat their own result, kernels are not deterministic: this is logged, and no step is repeated any more.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateUsage=false

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model
from torch import distributed
from torch.utils import _pytree as trees

from conf.schema.run import Run
from contract.faults import Fault
from trainer.patches.gradients import repeated_passes
from trainer.startup.console import say
from trainer.training import replicas
from trainer.training.metrics import Metrics
from trainer.weights import digests

ADVICE = "train.repeat_every: kernels of this run are not deterministic, so no step is repeated"
LENGTHS = ("seq_length", "decoder_seq_length")


class RepeatedSteps(Callback):
    def __init__(self, run: Run, metrics: Metrics):
        assert isinstance(run.checkpoint.save_every, int)  # steps: trainer.train has a resolved schedule
        self.every = (run.train.repeat_every, run.checkpoint.save_every)
        self.metrics, layout = metrics, run.layout
        # Ranks to the next one that has the same part of the model, and the same experts.
        distance = math.lcm(layout.tp * layout.cp, layout.etp * layout.ep)
        self.shift = distance // (layout.tp * layout.cp) % (layout.world // (layout.tp * layout.cp * layout.pp))
        repeated_passes.install(self.run)

    def on_train_start(self, context: Any) -> None:
        self.context = context

    def run(self, passes: Callable[..., Any], **arguments: Any) -> Any:
        """Run the passes of a step. Bridge calls it instead of megatron-core's function."""
        step = self.context.state.train_state.step + 1
        if all(step % every for every in self.every):
            return passes(**arguments)
        chunks, machine = arguments["model"], get_rerun_state_machine()
        own = _read(arguments)
        config = get_model_config(chunks[0])
        finalize, sums = config.finalize_model_grads_func, []

        def once(batches: dict[str, Any], then: Callable[..., None] | None = None) -> Any:
            machine._restore_state()
            self.metrics.gradients.begin_step(self.metrics.gradients.logged)
            for chunk in chunks:
                chunk.zero_grad_buffer()

            def add_up_and_finalize(*args: Any, **kwargs: Any) -> None:
                sums.append(_sums(chunks))
                if then:
                    then(*args, **kwargs)

            config.finalize_model_grads_func = functools.wraps(finalize)(add_up_and_finalize)
            return passes(**arguments | _iterators(batches))

        machine._save_state()
        try:
            once(self._exchanged(own))
            losses = once(own, finalize)
            other, usual = _of_all(sums[0]), _of_all(sums[1])
            if self._differ(other, usual):
                once(own)
                self._judge(step, chunks, other, usual, _of_all(sums[2]))
                once(own, finalize)  # kernels are not deterministic
        finally:
            config.finalize_model_grads_func = finalize
        return losses

    def _exchanged(self, own: dict[str, Any]) -> dict[str, Any]:
        """The batches of the rank at the distance `shift`."""
        if not self.shift:
            return own
        group = parallel_state.get_data_parallel_group()
        of_ranks: list[Any] = [None] * group.size()
        distributed.all_gather_object(of_ranks, _on(torch.device("cpu"), own), group=group)
        tensors = (leaf for leaf in trees.tree_leaves(own) if isinstance(leaf, torch.Tensor))
        device = next(tensors, torch.empty(0, device="cpu")).device
        return _on(device, of_ranks[(group.rank() + self.shift) % group.size()])

    def _differ(self, other: torch.Tensor, usual: torch.Tensor) -> bool:
        """Whether a rank's result for another's batches differs anywhere. All ranks must call it."""
        differ = (other != usual.roll(-self.shift, 0)).any().to(torch.int64).reshape(1)
        distributed.all_reduce(differ, op=distributed.ReduceOp.MAX)
        return bool(differ.item())

    def _judge(self, step: int, chunks: list[Any], other: torch.Tensor, usual: torch.Tensor, again: torch.Tensor):
        """Raise a Fault that names the wrong ranks. Return if kernels are not deterministic."""
        group = parallel_state.get_data_parallel_group()
        ranks, count = distributed.get_process_group_ranks(group), group.size()
        unsteady = usual != again
        if not self.shift:  # two equal results of three show a single error
            unsteady &= (other != usual) & (other != again)
        unsteady = unsteady.any(1).to(torch.int64)
        distributed.all_reduce(unsteady, op=distributed.ReduceOp.MAX)
        if int(unsteady.sum()) > count / 2:
            say(f"step {step}: {ADVICE}")
            self.every = ()
            return
        wrong: dict[int, list[str]] = {}
        unclear: dict[tuple[int, ...], list[str]] = {}
        names = (f"gradient of {name}" for name, _ in _trained(chunks))
        for name, others, own, repeated in zip(
            names, other.T.tolist(), usual.T.tolist(), again.T.tolist(), strict=True
        ):
            odd = [place for place in range(count) if own[place] != repeated[place]]
            pairs = [(place, (place + self.shift) % count) for place in range(count)]
            pairs = [(place, owner) for place, owner in pairs if others[place] != own[owner] and owner not in odd]
            seen = Counter(place for pair in pairs for place in pair)
            twice = [place for place, times in seen.items() if times > 1]
            if twice and count // math.gcd(count, self.shift) == 2:
                unclear.setdefault(tuple(sorted(ranks[place] for place in twice)), []).append(name)
            else:
                odd += twice or [place for place, _ in pairs]
            for place in odd:
                wrong.setdefault(ranks[place], []).append(name)
        raise Fault("\n".join(replicas.lines(step, wrong, unclear, of_one_host=True)))


def _read(arguments: dict[str, Any]) -> dict[str, Any]:
    """The micro batches of a step, of each chunk of the model, and their length."""
    iterators, count = arguments["data_iterator"], arguments["num_microbatches"]
    several = iterators if isinstance(iterators, list) else [iterators]
    batches = [one and [next(one) for _ in range(count)] for one in several]
    return {"batches": batches, "several": isinstance(iterators, list)} | {key: arguments[key] for key in LENGTHS}


def _iterators(read: dict[str, Any]) -> dict[str, Any]:
    iterators = [None if one is None else iter(one) for one in read["batches"]]
    lengths = {key: read[key] for key in LENGTHS}
    return lengths | {"data_iterator": iterators if read["several"] else iterators[0]}


def _on(device: torch.device, tree: Any) -> Any:
    return trees.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _trained(chunks: list[Any]) -> list[tuple[str, Any]]:
    named = (item for chunk in unwrap_model(chunks) for item in chunk.named_parameters())
    return [(name, weight) for name, weight in named if weight.requires_grad]


def _sums(chunks: list[Any]) -> torch.Tensor:
    return torch.stack([digests.sum_of_words([weight.main_grad]) for _, weight in _trained(chunks)])


def _of_all(sums: torch.Tensor) -> torch.Tensor:
    """The sums of all data-parallel ranks."""
    group = parallel_state.get_data_parallel_group()
    table = torch.empty(group.size() * len(sums), dtype=torch.int64, device=sums.device)
    distributed.all_gather_into_tensor(table, sums, group=group)
    return table.view(group.size(), -1)
