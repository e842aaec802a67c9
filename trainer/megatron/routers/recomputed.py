"""Values of micro batches for modules that recomputation runs again in backward."""

from collections import deque

import torch


class Recomputed[Value]:
    """Values that a module took in forward passes that run again, oldest first.

    A pipeline runs the forward pass of a micro batch before it recomputes an earlier one. Micro batches of a stage go
    backward in the order in which they went forward.
    """

    def __init__(self) -> None:
        self.kept: deque[Value] = deque()

    def take(self, now: Value) -> Value:
        """The value for the pass that runs: `now` in forward, and in backward that of the micro batch's forward."""
        if torch._C._current_graph_task_id() != -1:  # autograd runs
            return self.kept.popleft()
        if not torch.is_grad_enabled():  # the first pass of a recomputed module
            self.kept.append(now)
        return now
