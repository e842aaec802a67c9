"""Work of the first rank, for all: the others hear the outcome, so that a fault ends all of them alike."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch import distributed

from contract.faults import Fault

LONGEST = timedelta(days=1)  # that a rank waits, as for all answers of a step; a first rank that has ended is noticed


class FirstRank:
    """Calls of the first rank. Every rank makes the same ones, in the same order."""

    @cached_property
    def _waiting(self) -> Any:
        """Group in which the others wait. NCCL would wait on the GPU, of which vLLM may have its turn."""
        return distributed.new_group(backend="gloo", timeout=LONGEST)

    def __call__(self, call: Callable[[], Any] | None, drained: Iterator[Any] | None = None) -> Any:
        """What rank 0 gets from the call, on every rank. `drained` is what the others have to go through meanwhile."""
        outcome: list[Any] = [None]
        if distributed.get_rank() == 0:
            assert call is not None
            try:
                outcome = [(True, call())]
            except Fault as fault:
                outcome = [(False, str(fault))]
                if drained is not None:
                    for _ in drained:  # the others wait for this rank in each tensor
                        pass
        elif drained is not None:
            for _ in drained:
                pass
        distributed.broadcast_object_list(outcome, src=0, group=self._waiting)
        well, found = outcome[0]
        if not well:
            raise Fault(found)
        return found
