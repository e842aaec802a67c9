"""Values of micro batches for modules that run again in the backward pass (recomputation)."""

from collections import deque

import torch


class Recomputed[Value]:
    """Queue of a module's values in forward passes that will be recomputed, oldest first.

    A pipeline runs the forward pass of a micro batch before it recomputes an earlier one. Within a stage, micro batches
    run backward in the order of their forward passes.
    """

    def __init__(self) -> None:
        self.kept: deque[Value] = deque()

    def take(self, now: Value) -> Value:
        """Return the value for the current pass: `now` in forward; in backward, the value of the same forward pass."""
        if torch._C._current_graph_task_id() != -1:  # autograd runs
            return self.kept.popleft()
        if not torch.is_grad_enabled():  # the first pass of a recomputed module
            self.kept.append(now)
        return now
