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

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import queue
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HIDDEN = (
    "accelerate",
    "boto3",
    "comet_ml",
    "fla",
    "flashinfer",
    "httpx._main",
    "mlflow",
    "multistorageclient",
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
PROMISED = {
    "datasets": ("builder", "concatenate_datasets", "load_dataset"),
    "megatron.bridge.data.builders.direct_hf_sft": (
        "DirectHFSFTDatasetBuilder",
        "DirectHFSFTDatasetConfig",
        "direct_hf_sft_train_valid_test_datasets_provider",
    ),
    "megatron.bridge.data.builders.energon": (
        "EnergonDatasetBuilder",
        "EnergonDatasetConfig",
        "HFEnergonTaskEncoderConfig",
        "NemotronOmniEnergonTaskEncoderConfig",
        "QwenVLEnergonTaskEncoderConfig",
        "energon_train_valid_test_datasets_provider",
    ),
    "megatron.bridge.data.builders.mock_vlm_sft": (
        "MockVLMSFTDatasetBuilder",
        "MockVLMSFTDatasetConfig",
        "mock_vlm_sft_train_valid_test_datasets_provider",
    ),
    "megatron.bridge.models.hybrid.hybrid_builder": ("HybridModelConfig",),
    "megatron.bridge.models.hybrid.hybrid_provider": ("HybridModelProvider",),
    "megatron.training.models.hybrid": ("HybridModelBuilder", "HybridModelConfig"),
    "torch._dynamo": (),
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "torch.fx.experimental.symbolic_shapes": ("statically_known_true",),
    "torch.utils.cpp_extension": ("load_inline",),
    "torch.utils.tensorboard": ("SummaryWriter",),
    "torch.utils.tensorboard.writer": ("SummaryWriter",),
}


def install() -> None:
    """Make Megatron-Bridge importable on this host, quickly. Call once, before the first import of Megatron."""
    sys.modules.update(dict.fromkeys(HIDDEN))  # None: `import` raises and find_spec finds nothing
    for module, functions in MODELOPT.items():
        for function in functions:
            setattr(_stand_in(module), function, lambda *args, **kwargs: None)
        _stand_in(module)
    _stand_in("modelopt.torch.distill.plugins.megatron").DistillationConfig = object
    with _promises():
        _import_transformers()
        import megatron.core.datasets.helpers_cpp  # noqa: F401  (2: proves that nothing has to be compiled)
        import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  (1: it probes for the package at import)

        _import_pretrain()
        import megatron.bridge.models.conversion.auto_bridge  # noqa: F401
    import megatron.bridge.training.initialize as initialize

    initialize.compile_helpers = lambda: None


@contextlib.contextmanager
def _promises():
    for module, names in PROMISED.items():
        if module not in sys.modules:
            sys.modules[module] = _Promised(module, names)
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(sys.modules["torch._dynamo"], name, lambda f=None, *a, **k: f if f else lambda f: f)
    yield
    for module in PROMISED:
        if isinstance(sys.modules.get(module), _Promised) and module != "torch._dynamo":
            del sys.modules[module]


class _Promised(ModuleType):
    def __init__(self, module: str, names: tuple[str, ...]):
        super().__init__(module)
        self.__spec__ = ModuleSpec(module, None)
        for name in names:
            setattr(self, name, _Promise(name, (), {"__module__": module}))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        import traceback; print("PROMISED", self.__name__, name, file=sys.stderr); traceback.print_stack(limit=20)
        return getattr(_real(self.__name__), name)


def _real(module):
    if isinstance(sys.modules.get(module), _Promised):
        del sys.modules[module]
    return importlib.import_module(module)


class _Promise(type):
    def __call__(cls, *args, **kwargs):
        return getattr(_real(cls.__module__), cls.__name__)(*args, **kwargs)

    def __instancecheck__(cls, instance) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or isinstance(module, _Promised):
            return False
        return isinstance(instance, getattr(module, cls.__name__))


class _Distributions(dict):
    def __missing__(self, package: str):
        importlib.metadata.version(package)
        return [package]


def _import_transformers() -> None:
    whole = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _Distributions
    from transformers.utils import import_utils

    importlib.metadata.packages_distributions = whole
    scan = import_utils.define_import_structure
    folder = importlib.util.find_spec("transformers.models").submodule_search_locations[0]
    found = scan(Path(folder), prefix="models")
    import_utils.define_import_structure = lambda path: {
        backends: {name.removeprefix("models."): names for name, names in modules.items() if name.startswith("models.")}
        for backends, modules in found.items()
    }
    import transformers.models
    import_utils.define_import_structure = scan


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
