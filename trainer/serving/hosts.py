"""Hosts that serve one model together: one stage of vLLM's pipeline per host, tensor parallelism within the host.

A gang starts one process of trainer.evaluate on each host. The process of the first host runs the engine and sends the
requests. The others start vLLM's workers on their host and wait until the gang ends them: vLLM does not inform them
when the engine ends, and lets them exit with code 0 when one of their workers has died
(https://github.com/vllm-project/vllm/issues/32136).
"""

import itertools
import os
import socket
from datetime import timedelta
from typing import Any, NoReturn

from trainer.startup import heartbeat

WITHIN = 300.0  # seconds that the first host may need to publish its port
# Beginnings of torchrun's variables that would mislead vLLM: with TORCHELASTIC_USE_AGENT_STORE, each worker would wait
# for a server that nobody starts.
OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_")


def is_one_of_several() -> bool:
    """Whether a gang started this process."""
    return "GANG_ATTEMPT" in os.environ


def only_computes() -> bool:
    """Whether another host sends the requests and gets the answers."""
    return is_one_of_several() and os.environ.get("RANK", "0") != "0"


def meet() -> dict[str, Any]:
    """Connect with the other hosts of the gang. Returns vLLM's arguments about them; empty without a gang."""
    if not is_one_of_several():
        return {}
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    name = os.environ["GANG_ATTEMPT"]
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(master, port, is_master=False, timeout=timedelta(seconds=WITHIN))
    if node == 0:
        here = os.environ["GANG_ADDRESS"]
        store.set(f"serving/{name}", f"{here}:{free_port(here)}")
    address, _, free = store.get(f"serving/{name}").decode().rpartition(":")
    for variable in [variable for variable in os.environ if variable.startswith(OF_TORCHRUN)]:
        del os.environ[variable]
    place = {"nnodes": nodes, "node_rank": node, "pipeline_parallel_size": nodes}
    return place | {"distributed_executor_backend": "mp", "master_addr": address, "master_port": int(free)}


def follow(**arguments: Any) -> NoReturn:
    """Run the workers of this host for the engine of another host. Takes the same arguments as vllm.LLM there."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    settings = EngineArgs(**arguments, disable_log_stats=True)  # as vllm.LLM does
    config = settings.create_engine_config(usage_context=UsageContext.LLM_CLASS)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    raise RuntimeError("vLLM's workers on this host have ended unexpectedly")


def report_steps(engine: Any) -> None:
    """Make each step of the engine update this rank's heartbeat (trainer/startup/heartbeat.py)."""
    step, numbers = engine.step, itertools.count()

    def reported_step():
        number = next(numbers)
        heartbeat.phase("answering" if number else "first step")  # the first step may compile
        outputs = step()
        heartbeat.step(number + 1)
        return outputs

    engine.step = reported_step


def free_port(address: str) -> int:
    """A port of this host's address on which nobody listens."""
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]
