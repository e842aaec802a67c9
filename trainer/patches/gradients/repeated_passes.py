"""Patch of Megatron-Bridge's loop: another function runs the passes of a step, and may run them more than once.

megatron-core's RerunStateMachine repeats the passes of a step on the same rank if a loss looks wrong. It compares
losses, not gradients, and for another rank it saves a checkpoint and ends the program. Remove when it takes the
batches of another rank: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/rerun_state_machine.py
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.patches import versions


def install(run: Callable[..., Any]) -> None:
    """Have `run` called with megatron-core's function and its arguments, instead of that function."""
    versions.check(__name__)
    from megatron.bridge.training import train

    usual = train.get_forward_backward_func
    train.get_forward_backward_func = lambda **sizes: partial(run, usual(**sizes))
