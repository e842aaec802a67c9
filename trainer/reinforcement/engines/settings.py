"""Settings of the engines: vLLM's arguments, the way that weights go, and the part of the host that each has."""

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
from trainer.serving.engine import DTYPE
from trainer.startup import device

BLOCK = 16  # tokens of a block of keys and values on a CPU: its default holds a whole row, and is never shared


def transport(run: Run) -> str:
    """The way that weights get to vLLM on this host."""
    asked = reinforcement.transport(run, device.has_gpu())
    if asked == "nccl" and not device.has_gpu():
        raise Fault("reinforce.transport: nccl goes from GPU to GPU, and this host has none; gloo does not")
    return asked


def environment(run: Run, number: int) -> dict[str, str]:
    """Environment of an engine: its GPUs, of training or behind those of training, or its share of the cores."""
    asked = run.reinforce
    if device.has_gpu():
        return {"CUDA_VISIBLE_DEVICES": _gpus(run, number)} if asked.engine_gpus else {}
    if asked.engines * cut(run) == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (asked.engines * cut(run))))}


def _gpus(run: Run, number: int) -> str:
    import torch

    asked = run.reinforce
    before = 0 if asked.hosts or in_turn(run) else run.layout.gpus_per_node
    there, wanted = torch.cuda.device_count(), before + asked.engines * asked.engine_gpus
    if there < wanted:
        beside = f" beside the {before} of training" if before else ""
        raise Fault(
            f"reinforce.engine_gpus: {asked.engines} x {asked.engine_gpus} GPUs{beside} are {wanted}, and {there} "
            "can be used here"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(one) for one in range(there)]
    first = before + number * asked.engine_gpus
    return ",".join(names[first : first + asked.engine_gpus])


def require_room_beside(run: Run) -> None:
    """Raise a Fault where several things would want the first GPU at once, or engines have no core each."""
    asked, cores = run.reinforce, os.cpu_count() or 1
    if not device.has_gpu() and asked.engines > cores:
        raise Fault(
            f"reinforce.engines: {asked.engines} processes of vLLM, but this host has {cores} cores; {cores} at most"
        )
    if not device.has_gpu() and asked.engines * cut(run) > max(cores, asked.engines):
        raise Fault(
            f"reinforce.engine_gpus: {asked.engines} x {asked.engine_gpus} processes of vLLM, and this host has "
            f"{cores} cores; {max(cores // asked.engines, 1)} at most, or 0"
        )
    if device.has_gpu() and not asked.engine_gpus and (asked.staleness or asked.engines > 1):
        key = f"staleness: {asked.staleness}" if asked.staleness else f"engines: {asked.engines}"
        raise Fault(
            f"reinforce.{key}, but vLLM and Megatron have this host's first GPU in turn; reinforce.engine_gpus=1 gives "
            "vLLM GPUs of its own"
        )


def require_reach(run: Run) -> None:
    """Raise a Fault where a GPU of vLLM's cannot read the memory of the first one, which has the weights.

    It touches the GPU: how a process allocates there has to be settled before.
    """
    import torch

    if not (device.has_gpu() and in_turn(run) and transport(run) == "ipc"):
        return
    for other in range(1, run.reinforce.engines * cut(run)):
        if not torch.cuda.can_device_access_peer(other, 0):
            raise Fault(
                f"reinforce.transport: ipc, but GPU {other} of this host cannot read the memory of its first one, from "
                "which all workers of vLLM take the weights; gloo"
            )


def of(run: Run) -> dict[str, Any]:
    """All that an engine is told as it starts."""
    return {"kernels": run.paths.kernels, "transport": transport(run), "arguments": arguments(run)}


def arguments(run: Run) -> dict[str, Any]:
    """Arguments of vLLM."""
    asked, length = run.reinforce, run.data.seq_length
    together, gpus = asked.prompts * asked.samples, cut(run)
    spread = gpus > 1 and has_whole_experts(_facts(run), gpus)
    found: dict[str, Any] = {
        "model": run.paths.model,
        "dtype": DTYPE[run.train.precision],
        "trust_remote_code": run.model.trust_remote_code,
        "seed": asked.seed,
        "max_model_len": length,
        "max_num_seqs": min(256, together),
        "logprobs_mode": "processed_logprobs",  # at the temperature that was sampled at
        "disable_log_stats": True,
        "hf_overrides": {"head_dtype": "float32"},  # logits, as trainer/reinforcement/policy/exact_logits.py has them
    }
    if gpus > 1:
        found |= {"tensor_parallel_size": gpus, "enable_expert_parallel": spread}
    if asked.replay_experts:
        found["enable_return_routed_experts"] = True
    if asked.transport == "adapter":
        layers = frozenset(name for target in run.adapter.names for name in ADAPTED[target])
        found |= unmerged.Adapter(Path(), run.name, run.adapter.rank, layers).settings(gpus, expert_parallel=spread)
    if vllm_cpu.is_installed():
        # Seeds of single requests fail there where a prompt is read in parts: "CPU Generator does not use offset"
        found |= {"enforce_eager": True, "block_size": BLOCK, "max_num_batched_tokens": together * length}
    if device.has_gpu():
        found |= {"enable_sleep_mode": in_turn(run)} | _share(run)
    return found


def _share(run: Run) -> dict[str, Any]:
    """Settings that keep vLLM to its share of the GPU, as the plan counts on it."""
    facts = _facts(run)
    gpu = hardware.by_device(nvidia_smi.kind() or "") or hardware.of(run)
    if not gpu.cuda:  # of a kind that nobody has described
        return {}
    found = rollout.of(run, facts, gpu)
    if found.lacks > 0:
        if run.hardware.gate != "warn":
            raise Fault(f"reinforce: {rollout.unanswered(run, facts, gpu)}")
        return {}
    return {
        "gpu_memory_utilization": round(found.taken / gpu.memory, 3),
        "kv_cache_memory_bytes": found.cache,
        "max_num_batched_tokens": found.way.tokens,
    }


def _facts(run: Run) -> ModelFacts:
    return facts_from_hf(config_json.read(Path(run.paths.model) / config_json.NAME))
