"""Measure a few real steps of a run on this machine, with random weights; only the measurements are written.

    python -m trainer.measure RESOLVED.yaml         trainer.trial starts it; or torchrun, on each of several hosts

The recipe, the model, the adapter and the loop are those of trainer.train. Random weights are drawn on the device, so
no checkpoint is needed; of paths.model only config.json is read. paths.data holds random tokens (trainer.trial).

It writes <paths.output>/measured.json, a list with one object per rank:

    seconds                     from the end of a step to the end of the next, without the first step
    losses                      of every step, on ranks of the last pipeline stage
    weights, adapters, gradients, optimizer, host_states      bytes that stay, counted tensor by tensor
    resting, peak, reserved     bytes between steps and at most, from torch's allocator
    used                        bytes of the device in use at the end, by all processes
    product                     FLOP/s of a large matrix product in the weights' precision, on all ranks right after

A rank that runs out of memory writes <paths.output>/out-of-memory.json instead, and all ranks end.

Not covered: saving, validation, and effects of real data (rows of unequal length, learned routing).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
import logging
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from conf.model_facts import facts_from_hf
from conf.model_files import config_json
from conf.rules.layout import problems
from conf.schema.run import Run
from contract.faults import Fault
from trainer.checks import attention
from trainer.hosts import products
from trainer.profiling.recorder import recorder
from trainer.startup import device, entry
from trainer.startup.console import megatron_to
from trainer.weights import atomic_folder

RESULT, EXHAUSTED = "measured.json", "out-of-memory.json"
LOSS = "lm loss"  # Megatron-Bridge's name for the mean over the step's tokens
SILENCED = "megatron.bridge.training.pretrain"


def check(run: Run) -> None:
    path = Path(run.paths.model) / "config.json"
    if not path.is_file():
        raise Fault(f"paths.model: {path}: no such file; python -m trainer.trial writes it")
    if lines := problems(run, facts_from_hf(config_json.read(path))):
        raise Fault("\n".join(lines))


def main(run: Run) -> None:
    device.start()
    import torch
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from trainer.megatron import adapters, next_batch
    from trainer.megatron.next_batch import NextBatch
    from trainer.patches.gradients import local_norms
    from trainer.training import bridge_loop

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.has_gpu() and here > torch.cuda.device_count():
        raise Fault(f"layout.gpus_per_node: {here}, but this host has {torch.cuda.device_count()}")
    logging.getLogger(SILENCED).addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], torch.OutOfMemoryError))
    )
    output = Path(run.paths.output)
    output.mkdir(parents=True, exist_ok=True)
    callbacks = [local_norms.install(), _clock(output / RESULT), *([recorder(run)] if run.log.profile_every else [])]
    callbacks += [NextBatch()] if next_batch.helps(run) else []
    bridge_loop.bound_cleanup()
    try:
        # With an adapter for each of many experts, our initial values take minutes; Bridge's suffice here.
        with megatron_to(Path(run.paths.logs)), mock.patch.object(adapters, "draw_initial_values"):
            pretrain(configuration(run), forward_step, callbacks=callbacks)
    except torch.OutOfMemoryError as error:
        rank, line = int(os.environ["RANK"]), " ".join(str(error).split())
        allocated, (_, whole) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        figures = {"rank": rank, "allocated": allocated, "whole": whole, "line": line}
        (output / EXHAUSTED).write_text(json.dumps(figures))
        raise Fault(
            f"rank {rank}: out of memory with {allocated / 1e9:.1f} of {whole / 1e9:.1f} GB allocated"
        ) from error


def configuration(run: Run):
    """Return the configuration of a training run, except weights, tokenizer and checkpoints."""
    from megatron.bridge.training.config import TokenizerConfig

    from trainer.megatron.recipe import make_config
    from trainer.patches import null_tokenizer
    from trainer.rehearsal.meta_model import open_bridge, without_checkpoint

    config = config_json.read(Path(run.paths.model) / config_json.NAME)
    container = make_config(run, open_bridge(config), None)
    attention.check(run, container.model)
    if run.model.base != "bf16":
        _draw_packed(run, container.model)
    without_checkpoint(run, container)
    null_tokenizer.install()
    padded = facts_from_hf(config).vocab_pad > 0
    container.tokenizer = TokenizerConfig(
        tokenizer_type="NullTokenizer", vocab_size=container.model.vocab_size, use_tokenizer_vocab_size=padded
    )
    return container


def _draw_packed(run: Run, provider) -> None:
    """Build the model without memory for its packed weights, and draw random codes for them."""
    from trainer.megatron.packed_base import drawn
    from trainer.patches.checkpoints import base_loading

    end = base_loading.build_without_memory()

    def draw(chunks: list) -> list:
        end()
        drawn.draw(run, chunks)
        return chunks

    provider.register_pre_wrap_hook(draw)


def _clock(file: Path):
    """Return a callback that times steps and, at the end, writes the measurements of all ranks."""
    import torch
    from megatron.bridge.training.callbacks import Callback

    class Clock(Callback):
        def on_train_start(self, context) -> None:
            self.ends: list[float] = []
            self.losses: list[float] = []
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

        def on_train_step_end(self, context) -> None:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            self.losses += [float(loss) for name, loss in (context.loss_dict or {}).items() if name == LOSS]

        def on_train_end(self, context) -> None:
            free, whole = torch.cuda.mem_get_info()
            of_rank = {
                "seconds": [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)],
                "losses": self.losses,
                **held(context.model, context.optimizer),
                "resting": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "used": whole - free,
                "whole": whole,
                "device": torch.cuda.get_device_name() if device.has_gpu() else "cpu",
            }
            torch.cuda.empty_cache()
            weight = next(context.model[0].parameters())
            of_rank["product"] = products.speed(weight.device, weight.dtype)
            of_ranks = atomic_folder.gather(of_rank)
            if atomic_folder.rank() == 0:
                file.write_text(json.dumps(of_ranks))

    return Clock()


def held(chunks: list, optimizer) -> dict[str, int]:
    """Return the bytes of a rank's weights, of its gradients' buffers and of the optimizer's states, here and on the
    host.
    """
    held_bytes: dict[str, int] = dict.fromkeys(("weights", "adapters", "gradients", "optimizer", "host_states"), 0)
    of_model = set()  # storages of the model
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            held_bytes["adapters" if ".adapter." in name else "weights"] += _size(parameter)
            if not hasattr(parameter, "packed_bytes"):
                of_model.add(_place(parameter))
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            held_bytes["gradients"] += _size(buffer.grad_data)
            of_model |= {_place(data) for data in (buffer.param_data, buffer.grad_data) if data is not None}
    for inner_optimizer in _optimizers(optimizer):
        for tensor in _states(inner_optimizer):
            if _place(tensor) not in of_model:
                of_model.add(_place(tensor))
                away = device.has_gpu() and tensor.device.type == "cpu"
                held_bytes["host_states" if away else "optimizer"] += tensor.untyped_storage().nbytes()
    return held_bytes


def _size(tensor) -> int:
    """Return the bytes of a tensor, including packed ones and TE's quantized ones, which have several parts."""
    if (packed := getattr(tensor, "packed_bytes", None)) is not None:
        return packed
    parts = [getattr(tensor, name, None) for name in ("_data", "_rowwise_data", "_columnwise_data")]
    parts = [part for part in parts if part is not None]
    return sum(part.numel() * part.element_size() for part in parts or [tensor])


def _place(tensor) -> int:
    whole = getattr(tensor, "_rowwise_data", None)
    return (tensor if whole is None else whole).untyped_storage().data_ptr()


def _optimizers(optimizer):
    """Yield torch's optimizers inside Megatron's, which chain, shard and offload."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", None)
        if inner is not None:
            yield inner
            yield from getattr(inner, "sub_optimizers", ())


def _states(optimizer):
    import torch

    waiting: list[Any] = [group["params"] for group in optimizer.param_groups] + list(optimizer.state.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.numel() > 1:  # a step counter is a number
                yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


if __name__ == "__main__":
    entry.start(main, check)
