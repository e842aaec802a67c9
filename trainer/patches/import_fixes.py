"""Fixes that Megatron-Bridge and megatron-core need outside NVIDIA's containers, with the condition for removing each.

Required fixes:

1. megatron.bridge.training.pretrain imports nvidia_resiliency_ext's CallWrapper for a type annotation. The package has
   no wheel for glibc < 2.39, so a promise replaces the name (PROMISED). Code that probes for the package still does not
   find it. Remove when Bridge guards the import. BRIDGE/training/pretrain.py
2. megatron.bridge.training.initialize runs `make` in megatron-core's data set folder. The wheel ships the compiled
   helper without a Makefile, and the failed make ends the process. Remove when Bridge imports before it builds.
   BRIDGE/training/initialize.py

Fixes for a faster start. It takes 4 s of CPU time instead of 10, including 2.5 s for `import torch`. If byte code is
not cached (PYTHONDONTWRITEBYTECODE), it takes 12 s instead of 26, including 5 s for torch.

3. Bridge's loop imports nvidia-modelopt for quantised and distilled models, and modelopt imports transformers' trainer,
   PEFT, vLLM and scikit-learn, which takes 20 to 50 s on every rank. Its four functions return at once for any other
   model, and so do their replacements. Remove when Bridge imports modelopt only when it is used.
4. Some packages are hidden from this process: experiment trackers, because training needs no network, and packages
   that are imported only because they are installed. Permanent.
5. Other packages are imported even if they are not used; a promise replaces each (PROMISED). Remove each when its
   importer imports it only on use.
6. torch's compiler, which takes 2 s to import, is omitted on a CPU, where nothing is compiled (cpu/cuda.py). Permanent.

BRIDGE is https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false

import contextlib
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from trainer.patches import lazy_bridge, transformers_imports, versions
from trainer.patches.checkpoints import files
from trainer.patches.gradients import accumulation, split

# Hidden packages, functions of modelopt, and names that are promised. (3 to 6)
HIDDEN, MODELOPT, PROMISED, COMPILER = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).values()


def install(compiles: bool) -> None:
    """Make Megatron-Bridge importable on this host, quickly. Call once, before the first import of Megatron."""
    versions.check(__name__)
    hidden: dict[str, Any] = dict.fromkeys(HIDDEN)
    sys.modules.update(hidden)  # None: `import` raises and find_spec finds nothing
    for module, functions in MODELOPT.items():
        for function in functions:
            setattr(_stand_in(module), function, lambda *args, **kwargs: None)
        _stand_in(module)
    _stand_in("modelopt.torch.distill.plugins.megatron").DistillationConfig = object

    with lazy_bridge.promised(PROMISED), contextlib.nullcontext() if compiles else _no_compiler():
        if compiles:
            accumulation.install()
            split.install()
        import megatron.core.datasets.helpers_cpp  # (2: proves that nothing needs compiling)

        transformers_imports.import_transformers()
        import megatron.bridge.models.conversion.auto_bridge
        import megatron.bridge.training.pretrain  # noqa: F401  (1)
        from megatron.bridge.training import initialize

    initialize.compile_helpers = lambda: None
    files.pass_results_here()


@contextlib.contextmanager
def _no_compiler():
    """Prevent the import of torch._dynamo for functions that are only marked as not to be compiled."""
    from torch.optim import Optimizer

    for method in (Optimizer.add_param_group, Optimizer.load_state_dict, Optimizer.state_dict, Optimizer.zero_grad):
        function = inspect.unwrap(method)
        function.__dynamo_disable = function  # torch._compile caches torch._dynamo's result here

    def mark(function=None, *args, **kwargs):
        return function or (lambda function: function)

    marks = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), mark)
    with lazy_bridge.promised({**COMPILER, "torch._dynamo": marks}):
        yield


def _stand_in(name: str) -> ModuleType:
    """Return an empty module of this name, with empty parent packages."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            module = sys.modules[path] = ModuleType(path)
            module.__spec__, module.__path__ = ModuleSpec(path, None, is_package=True), []
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    return sys.modules[name]
