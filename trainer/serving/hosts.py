"""Hosts that serve one model together: a stage of vLLM's pipeline on each, its tensors cut over the GPUs of the host.

A gang starts one process of trainer.evaluate on each host. That of the first holds the engine and asks. The others
start vLLM's workers of their own host, and wait until the gang ends them: vLLM tells them nothing when the engine is
done, and lets them end with exit code 0 when one of their workers has died
(https://github.com/vllm-project/vllm/issues/32136).
"""

import itertools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from trainer.startup import heartbeat

WITHIN = 300.0  # seconds that the first host may need to say its port
# torchrun's, which vLLM's workers would take for their own: with TORCHELASTIC_USE_AGENT_STORE each of them would look
# for a server that nobody starts.
OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_")


@dataclass(frozen=True)
class Place:
    """Place of this process among the hosts."""

    node: int
    nodes: int
    master: str  # address of the first host
    port: int  # at which vLLM's workers meet there


def is_one_of_several() -> bool:
    """Whether a gang started this process."""
    return "GANG_ATTEMPT" in os.environ


def only_computes() -> bool:
    """Whether another host asks, and has the answers."""
    return is_one_of_several() and os.environ.get("RANK", "0") != "0"


def meet() -> Place | None:
    """Meet the other hosts of the gang. None where this process is in none."""
    if not is_one_of_several():
        return None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    name = os.environ["GANG_ATTEMPT"]
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(master, port, is_master=False, timeout=timedelta(seconds=WITHIN))
    if node == 0:
        own = os.environ["GANG_ADDRESS"]
        store.set(f"serving/{name}", f"{own}:{_free_port(own)}")
    address, _, free = store.get(f"serving/{name}").decode().rpartition(":")
    for variable in [variable for variable in os.environ if variable.startswith(OF_TORCHRUN)]:
        del os.environ[variable]
    return Place(node, nodes, address, int(free))


def arguments(place: Place | None) -> dict[str, Any]:
    """Arguments of vLLM that say where this process stands."""
    if place is None:
        return {}
    among = {"nnodes": place.nodes, "node_rank": place.node, "pipeline_parallel_size": place.nodes}
    met = {"master_addr": place.master, "master_port": place.port}
    return {"distributed_executor_backend": "mp"} | among | met


def follow(**arguments: Any) -> NoReturn:
    """Run the workers of this host for the engine of another. Takes the arguments that vllm.LLM has there."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    asked = EngineArgs(**arguments, disable_log_stats=True)  # as vllm.LLM does
    config = asked.create_engine_config(usage_context=UsageContext.LLM_CLASS)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    raise RuntimeError("vLLM's workers of this host have ended, and nobody asked them to")


def show_steps(engine: Any) -> None:
    """Let each step of the engine count as a sign of life (trainer/startup/heartbeat.py)."""
    step, made = engine.step, itertools.count()

    def shown():
        number = next(made)
        heartbeat.phase("answering" if number else "first step")  # the first one may compile
        outputs = step()
        heartbeat.step(number + 1)
        return outputs

    engine.step = shown


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]
