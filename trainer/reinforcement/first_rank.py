"""Work of the first rank for all ranks: the others get its result or its Fault, which then ends all ranks."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch import distributed

from contract.faults import Fault

LONGEST = timedelta(days=1)  # limit for a rank's wait, for example for answers; if rank 0 ends, the wait ends earlier


class FirstRank:
    """Calls of the first rank. Every rank makes the same ones, in the same order."""

    @cached_property
    def _waiting(self) -> Any:
        """Group in which the other ranks wait. NCCL would wait on the GPU, which vLLM may be using."""
        return distributed.new_group(backend="gloo", timeout=LONGEST)

    def __call__(self, call: Callable[[], Any], drained: Iterator[Any] | None = None) -> Any:
        """Return rank 0's result of the call, on every rank.

        Meanwhile the other ranks iterate over `drained`, because all ranks together compute each of its items.
        """
        outcome: list[Any] = [None]
        if distributed.get_rank() == 0:
            try:
                outcome, drained = [(True, call())], None
            except Fault as fault:
                outcome = [(False, str(fault))]  # the other ranks wait for this rank in each remaining item
        for _ in drained or ():
            pass
        distributed.broadcast_object_list(outcome, src=0, group=self._waiting)
        succeeded, result = outcome[0]
        if not succeeded:
            raise Fault(result)
        return result
