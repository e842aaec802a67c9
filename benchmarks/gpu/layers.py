"""Seconds that the host takes to start a layer's kernels, as Megatron-Bridge builds it: a section of calibrate.py.

Models so narrow that the device waits for the host, with 2 and with 6 layers: the difference is that of 4 layers, what
is left that of a microbatch. As in training, with DistributedDataParallel around them.
"""

# pyright: reportAttributeAccessIssue=false

import copy
import json
import os
import statistics
import time
from itertools import product
from typing import Any

from calibrate import ROOT, tried

TOKENS, FEW, MANY, TIMES = 256, 2, 6, 6
NARROW = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1024}
NARROW |= {"intermediate_size": 1536}
ALONE = [f"layout.{key}=1" for key in ("nodes", "gpus_per_node", "tp", "pp", "cp", "ep", "etp")] + [
    "layout.sp=false",
    "layout.vpp=null",
]
FP8 = {"current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}


def layers() -> None:
    import torch

    from trainer.startup import device

    device.start()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29419", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group(device.backend())
    for low, adapter in product(("bf16", *FP8), ("none", "lora")):
        tried(f"dense {adapter} {low}", per_layer, 0, adapter, low)
    for experts, adapter, low in product((8, 32, 160), ("none", "lora"), ("bf16", "blockwise")):
        tried(f"{experts} experts {adapter} {low}", per_layer, experts, adapter, low)
    tried("160 experts none current", per_layer, 160, "none", "current")
    torch.distributed.destroy_process_group()


def per_layer(experts: int, adapter: str, low: str) -> dict[str, Any]:
    """Milliseconds of a layer, and of the rest. `first` is a microbatch that quantizes the weights."""
    # The larger first: core's tracker of balancing losses has room for as many layers as it sees at first.
    many, few = (timed(build(experts, adapter, low, count), low) for count in (MANY, FEW))
    found: dict[str, Any] = {}
    for name, most in many.items():
        found[name] = (most - few[name]) / (MANY - FEW)
        found[f"{name}_rest"] = few[name] - FEW * found[name]
    return found


def build(experts: int, adapter: str, low: str, count: int):
    import torch
    from megatron.bridge.training.config import DistributedDataParallelConfig
    from megatron.core import parallel_state

    from conf.load import load
    from trainer.megatron.model import make_provider
    from trainer.megatron.recipe import make_adapter
    from trainer.rehearsal.meta_model import open_bridge

    name = "glm47" if experts else "llama31-70b"
    config = copy.deepcopy(json.loads((ROOT / "conf/models" / f"{name}.json").read_text())["config"])
    config |= NARROW | {"num_hidden_layers": count}
    if experts:
        config |= {"n_routed_experts": experts, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
        config["moe_intermediate_size"] = 256
    more = [f"adapter.kind={adapter}", "adapter.rank=16", f"data.seq_length={TOKENS}", "train.recompute=none"]
    run = load("glm47", [*ALONE, *more, "model.mtp=false", "moe.force_balance=true", "train.global_batch=1"])
    provider = make_provider(run, open_bridge(config))
    if low != "bf16":
        provider.fp8, provider.fp8_recipe = "hybrid", FP8[low]
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=1)
    if made := make_adapter(run):
        provider.register_pre_wrap_hook(lambda chunks: made(chunks, training=True))
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    ddp.finalize()
    [chunk] = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True)
    assert sum(parameter.numel() for parameter in chunk.parameters()) and torch.is_grad_enabled()
    return chunk


def timed(chunk, low: str) -> dict[str, float]:
    import torch
    from megatron.core.utils import unwrap_model

    ids = torch.randint(0, NARROW["vocab_size"], (1, TOKENS), device="cuda")
    places = torch.arange(TOKENS, device="cuda")[None]
    found: dict[str, list[float]] = {}
    for first in (False, True)[: 1 + (low != "bf16")]:
        for _ in range(TIMES):
            chunk.zero_grad_buffer()
            if first:
                unwrap_model(chunk).set_is_first_microbatch()
            torch.cuda.synchronize()
            marks = [time.perf_counter()]
            loss = chunk(input_ids=ids, position_ids=places, attention_mask=None, labels=ids)
            marks += [time.perf_counter()]
            torch.cuda.synchronize()
            marks += [time.perf_counter()]
            loss.float().mean().backward()
            torch.cuda.synchronize()
            marks += [time.perf_counter()]
            names = ("forward_host", "forward", "backward")
            for name, begin, end in zip(names, (0, 0, 2), (1, 2, 3), strict=True):
                found.setdefault(name + "_first" * first, []).append((marks[end] - marks[begin]) * 1e3)
    return {name: statistics.median(values[2:]) for name, values in found.items()}
