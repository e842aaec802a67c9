"""Settings of the engines: vLLM's arguments, the transport of weights, and each engine's share of the host."""

# pyright: reportOptionalMemberAccess=false

import os
from pathlib import Path
from typing import Any

from conf.host import nvidia_smi
from conf.model_facts import ModelFacts, facts_from_hf
from conf.model_files import config_json
from conf.planner import hardware
from conf.planner.serving import rollout
from conf.rules import reinforcement
from conf.rules.reinforcement import ADAPTED, cut, in_turn
from conf.rules.serving import has_whole_experts
from conf.schema.run import Run
from contract.faults import Fault
from trainer.patches import vllm_cpu
from trainer.serving import unmerged
from trainer.serving.engine import ALWAYS, DTYPE
from trainer.startup import device

BLOCK = 16  # tokens of a block of keys and values on a CPU: a default block holds a whole row and is never shared


def transport(run: Run) -> str:
    """The transport of weights to vLLM on this host."""
    configured = reinforcement.transport(run, device.has_gpu())
    if configured == "nccl" and not device.has_gpu():
        raise Fault("reinforce.transport: nccl needs GPUs, and this host has none; use gloo")
    return configured


def environment(run: Run, number: int) -> dict[str, str]:
    """Return the environment of an engine: its GPUs (training's, or the next ones), or its share of the cores."""
    reinforce = run.reinforce
    if device.has_gpu():
        return {"CUDA_VISIBLE_DEVICES": _gpus(run, number)} if reinforce.engine_gpus else {}
    if reinforce.engines * cut(run) == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (reinforce.engines * cut(run))))}


def _gpus(run: Run, number: int) -> str:
    import torch

    reinforce = run.reinforce
    of_training = 0 if reinforce.hosts or in_turn(run) else run.layout.gpus_per_node
    count, needed = torch.cuda.device_count(), of_training + reinforce.engines * reinforce.engine_gpus
    if count < needed:
        plus = f" and the {of_training} of training" if of_training else ""
        raise Fault(
            f"reinforce.engine_gpus: {reinforce.engines} x {reinforce.engine_gpus} GPUs{plus} are {needed}, but "
            f"{count} can be used here"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    first = of_training + number * reinforce.engine_gpus
    return ",".join(names[first : first + reinforce.engine_gpus])


def require_room(run: Run) -> None:
    """Raise a Fault if training and engines need the first GPU at the same time, or an engine has no core."""
    reinforce, cores = run.reinforce, os.cpu_count() or 1
    if not device.has_gpu() and reinforce.engines > cores:
        raise Fault(
            f"reinforce.engines: {reinforce.engines} processes of vLLM, but this host has {cores} cores; "
            f"{cores} at most"
        )
    if not device.has_gpu() and reinforce.engines * cut(run) > max(cores, reinforce.engines):
        raise Fault(
            f"reinforce.engine_gpus: {reinforce.engines} x {reinforce.engine_gpus} processes of vLLM, but this host "
            f"has {cores} cores; {max(cores // reinforce.engines, 1)} at most, or 0"
        )
    if device.has_gpu() and not reinforce.engine_gpus and (reinforce.staleness or reinforce.engines > 1):
        key = f"staleness: {reinforce.staleness}" if reinforce.staleness else f"engines: {reinforce.engines}"
        raise Fault(
            f"reinforce.{key}, but vLLM and Megatron use this host's first GPU in turn; reinforce.engine_gpus=1 gives "
            "vLLM separate GPUs"
        )


def require_reach(run: Run) -> None:
    """Raise a Fault if a GPU of vLLM cannot read the memory of the first GPU, which has the weights.

    The check initialises the GPU, so set up the allocator before the call.
    """
    import torch

    if not (device.has_gpu() and in_turn(run) and transport(run) == "ipc"):
        return
    for other in range(1, run.reinforce.engines * cut(run)):
        if not torch.cuda.can_device_access_peer(other, 0):
            raise Fault(
                f"reinforce.transport: ipc, but GPU {other} of this host cannot read the memory of the first GPU, from "
                "which all workers of vLLM take the weights; use gloo"
            )


def of(run: Run) -> dict[str, Any]:
    """Settings that an engine gets when it starts."""
    return {"kernels": run.paths.kernels, "transport": transport(run), "arguments": arguments(run)}


def arguments(run: Run) -> dict[str, Any]:
    """Arguments of vLLM."""
    reinforce, length = run.reinforce, run.data.seq_length
    together, gpus = reinforce.prompts * reinforce.samples, cut(run)
    spread = gpus > 1 and has_whole_experts(_facts(run), gpus)
    values: dict[str, Any] = {
        "model": run.paths.model,
        "dtype": DTYPE[run.train.precision],
        "trust_remote_code": run.model.trust_remote_code,
        "seed": reinforce.seed,
        "max_model_len": length,
        "max_num_seqs": min(256, together),
        "logprobs_mode": "processed_logprobs",  # with the temperature of the sampling
        "disable_log_stats": True,
        "hf_overrides": {"head_dtype": "float32"},  # as in trainer/reinforcement/policy/exact_logits.py
        **ALWAYS,
    }
    if gpus > 1:
        values |= {"tensor_parallel_size": gpus, "enable_expert_parallel": spread}
    if reinforce.replay_experts:
        values["enable_return_routed_experts"] = True
    if reinforce.transport == "adapter":
        layers = frozenset(name for target in run.adapter.names for name in ADAPTED[target])
        values |= unmerged.Adapter(Path(), run.name, run.adapter.rank, layers).settings(gpus, expert_parallel=spread)
    if vllm_cpu.is_installed():
        # On a CPU, seeds of requests fail if a prompt is read in parts: "CPU Generator does not use offset"
        values |= {"enforce_eager": True, "block_size": BLOCK, "max_num_batched_tokens": together * length}
    if device.has_gpu():
        values |= {"enable_sleep_mode": in_turn(run)} | _share(run)
    return values


def _share(run: Run) -> dict[str, Any]:
    """Settings that limit vLLM to its share of the GPU in the plan."""
    facts = _facts(run)
    gpu = hardware.by_device(nvidia_smi.kind() or "") or hardware.of(run)
    if not gpu.cuda:  # a kind without a data sheet
        return {}
    plan = rollout.of(run, facts, gpu)
    if plan.lacks > 0:
        if run.hardware.gate != "warn":
            raise Fault(f"reinforce: {rollout.unanswered(run, facts, gpu)}")
        return {}
    return {
        "gpu_memory_utilization": round(plan.taken / gpu.memory, 3),
        "kv_cache_memory_bytes": plan.cache,
        "max_num_batched_tokens": plan.way.tokens,
    }


def _facts(run: Run) -> ModelFacts:
    return facts_from_hf(config_json.read(Path(run.paths.model) / config_json.NAME))
