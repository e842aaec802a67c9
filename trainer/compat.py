"""What Megatron-Bridge 0.6.2 and megatron-core 0.19.2 need outside NVIDIA's containers, and when each can go.

1. megatron.bridge.training.pretrain imports nvidia_resiliency_ext's CallWrapper for a type annotation. The package has
   no wheel for glibc < 2.39, so an empty module stands in while pretrain is imported, and is taken out again: code
   that probes for the real package must not find it. Can go when Bridge guards the import.
2. megatron.bridge.training.initialize runs `make` in megatron-core's data set folder. The wheel ships the compiled
   helper and no Makefile, and the failed make ends the process. Can go when Bridge imports before it builds.
3. Bridge's loop imports nvidia-modelopt for quantised and distilled models, and modelopt imports transformers' trainer,
   PEFT, vLLM and scikit-learn: 20 to 50 s on every rank. Its four functions return at once for any other model, and
   so do their stand-ins. Can go when Bridge imports modelopt where it is used.
4. Some packages are hidden from this process: experiment trackers, because training talks to no network, and
   what transformers imports when it happens to be installed. Can stay.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

HIDDEN = (
    "comet_ml",
    "fla",
    "flashinfer",
    "mlflow",
    "peft",
    "scipy",
    "sklearn",
    "torchaudio",
    "torchvision",
    "vllm",
    "wandb",
)
MODELOPT = {
    "modelopt.torch.distill": (),
    "modelopt.torch.distill.plugins.megatron": ("get_tensor_shapes_adjust_fn_for_distillation",),
    "modelopt.torch.opt.plugins": ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"),
}


def install() -> None:
    """Make Megatron-Bridge importable on this host, quickly. Call once, before the first import of Megatron."""
    sys.modules.update(dict.fromkeys(HIDDEN))  # None: `import` raises and find_spec finds nothing
    for module, functions in MODELOPT.items():
        for function in functions:
            setattr(_stand_in(module), function, lambda *args, **kwargs: None)
        _stand_in(module)
    _stand_in("modelopt.torch.distill.plugins.megatron").DistillationConfig = object

    import megatron.core.datasets.helpers_cpp  # noqa: F401  (2: proves that nothing has to be compiled)
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  (1: it probes for the package at import)

    _import_pretrain()
    import megatron.bridge.training.initialize as initialize

    initialize.compile_helpers = lambda: None


def _import_pretrain() -> None:
    try:
        import nvidia_resiliency_ext.inprocess  # noqa: F401
    except ImportError:
        _stand_in("nvidia_resiliency_ext.inprocess").CallWrapper = object
    import megatron.bridge.training.pretrain  # noqa: F401

    if getattr(sys.modules["nvidia_resiliency_ext"].__spec__, "origin", None) is None:
        del sys.modules["nvidia_resiliency_ext"], sys.modules["nvidia_resiliency_ext.inprocess"]


def _stand_in(name: str) -> ModuleType:
    """An empty module of this name, with empty packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            module = sys.modules[path] = ModuleType(path)
            module.__spec__, module.__path__ = ModuleSpec(path, None, is_package=True), []
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    return sys.modules[name]
