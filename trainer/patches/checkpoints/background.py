"""Patch of Megatron-Bridge's saves: another object writes the planned files, while training continues.

With async_save, Bridge writes in a process that megatron-core forks from a process with CUDA and threads, or spawns; a
writer that dies is not noticed on a CPU. Between steps all ranks then reduce a number on the GPU and wait for it, and
write the metadata with training's own collectives. Its callbacks on_checkpoint_save get the weights of a later step.
Here Bridge saves as if it waited, and only the files come later. It also formats the run's configuration, always the
same, in 0.3 s of each save; here once. And it describes the frozen weights of experts with adapters, 20,000 of them in
Qwen3.5-35B, and leaves them out; here only the adapters are described. megatron-core clones tensors on the host that
are a part of a buffer; here `saves` copies them once.

Remove when Bridge's checkpoint manager is given the planned writers
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/checkpointing.py).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.patches import versions


def install(saves: Any) -> None:
    """Give the plans of saves to `saves`, wait for them at the end of training, and check them before each step."""
    versions.check(__name__)
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from megatron.bridge.peft.utils import is_grouped_expert_linear
    from megatron.bridge.training import checkpointing, pretrain, train
    from megatron.bridge.training.config import ConfigContainer
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy as Strategy

    cleanup, to_yaml = pretrain._cleanup_after_pretrain_failure, ConfigContainer.to_yaml
    content, text = None, ""  # of the configuration that was written last

    def finalize(global_state: Any, ckpt_cfg: Any, blocking: bool = False, terminate: bool = False) -> None:
        saves.wait() if blocking else saves.check()

    def end_and_clean_up(*arguments: Any) -> None:
        saves.end()
        cleanup(*arguments)

    def write_yaml(config: Any, path: str) -> None:
        nonlocal content, text
        if content == (now := config.to_dict()):
            Path(path).write_text(text)
        else:
            to_yaml(config, path)
            content, text = now, Path(path).read_text()

    def prepare(writer: Any, plan: Any, planner: Any) -> None:
        own = SimpleNamespace(resolve_data=lambda item: saves.copies.own(planner.resolve_data(item)))
        usual_prepare(writer, plan, own)

    def of_adapter(layer: Any, *arguments: Any, **keywords: Any) -> Any:
        if is_grouped_expert_linear(getattr(layer.adapter, "base_linear_name", "")):
            layer.to_wrap.sharded_state_dict = lambda *_: {}
        try:
            return of_layer(layer, *arguments, **keywords)
        finally:
            layer.to_wrap.__dict__.pop("sharded_state_dict", None)

    usual_prepare, Writer.prepare_write_data = Writer.prepare_write_data, prepare
    of_layer, AdapterWrapper.sharded_state_dict = AdapterWrapper.sharded_state_dict, of_adapter
    Strategy._get_save_and_finalize_callbacks = lambda strategy, writer, planned, kind: (writer, planned[1])
    Strategy.save = lambda strategy, state, folder: saves.take(*strategy.async_save(state, folder, "mcore"))
    ConfigContainer.to_yaml = write_yaml
    train.save_checkpoint_and_time = partial(saves.save, train.save_checkpoint_and_time)
    checkpointing.maybe_finalize_async_save = finalize
    pretrain._cleanup_after_pretrain_failure = end_and_clean_up
