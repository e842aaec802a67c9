"""Patches of the ways in which a checkpoint's files are written, and read.

Writing a small checkpoint takes 0.5 s instead of 5 to 10. megatron-core starts a process to carry the writers' results
back to this one, also when the writers are threads of this one. That process imports torch. Can go when
FileSystemWriterAsync makes a queue of its own for execute_sync:
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/strategies/filesystem_async.py

Reading goes by another reader than torch's, where a base holds no weights. megatron-core makes torch's itself
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/strategies/torch.py), and
Megatron-Bridge makes megatron-core's strategy. Can go when Bridge's load_checkpoint() takes a strategy, as its
save_checkpoint() does.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import queue
from pathlib import Path
from typing import Any

from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",), "megatron-core": ("0.19.2",)}


def pass_results_here() -> None:
    """Let threads of this process pass results by a queue of this process."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    make_queue = filesystem_async.get_write_results_queue

    def results_queue(mp_mode: str | None = None):
        if mp_mode is None and filesystem_async._results_queue is None:  # no other process takes part in saving
            return queue.Queue()
        return make_queue(mp_mode)

    filesystem_async.get_write_results_queue = results_queue


def read_by(reader: Any, folder: Path) -> None:
    """Have the tensors of the checkpoint in this folder read by this reader, one of torch's class FileSystemReader."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    usual = strategy._get_filesystem_reader

    def chosen(checkpoint_dir, *args, **kwargs):
        return reader if Path(checkpoint_dir) == folder else usual(checkpoint_dir, *args, **kwargs)

    strategy._get_filesystem_reader = chosen
