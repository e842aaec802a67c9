"""Questions to each of vLLM's workers, besides vLLM's own: an engine has a worker for each of its GPUs.

vLLM imports this module in every worker, by its setting worker_extension_cls, and makes Worker part of its own class.
A worker of several is a process of its own; the one of an engine on one GPU is in the engine's process.
"""

from typing import Any

from contract.faults import Fault
from trainer.patches import vllm_cpu
from trainer.reinforcement.transfer import weight_engine

NAME = f"{__name__}.Worker"

weight_engine.register()  # vLLM looks for it by its name, in each worker


class Worker:
    """Questions to a worker, for vLLM's collective_rpc."""

    weight_transfer_engine: Any
    model_runner: Any

    def answer_or_fault(self, name: str, arguments: dict[str, Any]) -> tuple[Any, str | None]:
        """Call a method. Returns its result, or the line of a fault of the run's: vLLM would bring it as any error."""
        try:
            return getattr(self, name)(**arguments), None
        except Fault as fault:
            return None, str(fault)

    def arrived_tensors(self) -> frozenset[str]:
        """Names of all tensors that came since the transfer began, were as they had been sent, and were loaded."""
        return frozenset(self.weight_transfer_engine.arrived)

    def cannot_repeat(self, sleeps: bool) -> str:
        """The reason that a transfer cannot be repeated here with other numbers; empty where it can."""
        return self.weight_transfer_engine.cannot_repeat(sleeps)

    def repeat_weights(self, **given: Any) -> None:
        self.weight_transfer_engine.repeat(**given)

    def end_repeated(self, sums: list[int]) -> None:
        self.weight_transfer_engine.end_repeated(sums)

    def seed_draws(self, seed: int) -> None:
        """Seed what vLLM draws from where a request has no seed of its own."""
        import numpy
        import torch

        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)

    def tell_routes(self) -> None:
        """Have experts on a CPU tell which of them they choose."""
        vllm_cpu.tell_routes(self.model_runner.get_model())
