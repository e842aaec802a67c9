"""Patches for writing and reading a checkpoint's files.

Writing a small checkpoint takes 0.5 s instead of 5 to 10. megatron-core starts a process to carry the writers' results
back to this process, even if the writers are threads of this process. The new process imports torch. Remove when
FileSystemWriterAsync makes a separate queue for execute_sync:
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/strategies/filesystem_async.py

Reading a base without weights uses another reader than torch's. megatron-core creates torch's reader itself
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/dist_checkpointing/strategies/torch.py), and
Megatron-Bridge creates megatron-core's strategy. Remove when Bridge's load_checkpoint() takes a strategy, as its
save_checkpoint() does.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import queue
from pathlib import Path
from typing import Any

from trainer.patches import versions


def pass_results_here() -> None:
    """Let threads of this process pass results through a queue of this process."""
    versions.check(__name__)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    make_queue = filesystem_async.get_write_results_queue

    def results_queue(mp_mode: str | None = None):
        if mp_mode is None and filesystem_async._results_queue is None:  # no other process takes part in saving
            return queue.Queue()
        return make_queue(mp_mode)

    filesystem_async.get_write_results_queue = results_queue


def read_by(reader: Any, folder: Path) -> None:
    """Read the tensors of the checkpoint in this folder with this reader, which has the class FileSystemReader of
    torch.
    """
    versions.check(__name__)
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    usual = strategy._get_filesystem_reader

    def chosen(checkpoint_dir, *args, **kwargs):
        return reader if Path(checkpoint_dir) == folder else usual(checkpoint_dir, *args, **kwargs)

    strategy._get_filesystem_reader = chosen
