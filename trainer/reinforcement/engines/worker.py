"""Additional methods of vLLM's workers: an engine has a worker for each of its GPUs.

vLLM imports this module in every worker, because of its setting worker_extension_cls, and adds Worker to its own class.
If an engine has several workers, each is a process; the worker of an engine on one GPU runs in the engine's process.
"""

from operator import attrgetter
from typing import Any

from contract.faults import Fault
from trainer.patches import vllm_cpu
from trainer.reinforcement.transfer import weight_engine

NAME = f"{__name__}.Worker"

weight_engine.register()  # each worker of vLLM looks it up by its name


class Worker:
    """Methods of a worker, for vLLM's collective_rpc."""

    weight_transfer_engine: Any
    model_runner: Any

    def answer_or_fault(self, name: str, arguments: dict[str, Any]) -> tuple[Any, str | None]:
        """Call a method of this worker or of its weight_transfer_engine, by its dotted name.

        Returns its result, or the line of a Fault, which vLLM would report like any other error.
        """
        try:
            return attrgetter(name)(self)(**arguments), None
        except Fault as fault:
            return None, str(fault)

    def arrived_tensors(self) -> frozenset[str]:
        """Names of all tensors that arrived undamaged since the transfer began, and were loaded."""
        return frozenset(self.weight_transfer_engine.arrived)

    def seed_draws(self, seed: int) -> None:
        """Seed the generators that vLLM uses for requests without a seed."""
        import numpy
        import torch

        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)

    def tell_routes(self) -> None:
        """Make the routers on a CPU record which experts they choose."""
        vllm_cpu.tell_routes(self.model_runner.get_model())
