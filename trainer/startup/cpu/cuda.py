"""Stand-in for torch.cuda on a host without it: streams without work, events that read the clock, a device named cpu.

Megatron allocates on "cuda", asks for the current device, synchronises streams and keeps the GPU's random state. Here
all of that uses the CPU: DeviceMode rewrites device arguments before torch gets them, and the functions that Megatron
calls on torch.cuda are replaced. Nothing else in the process changes.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install() -> None:
    """Replace torch.cuda's functions until this process ends. Call it once."""
    for name in _WITHOUT_EFFECT:
        setattr(torch.cuda, name, _nothing())
    for name in _MEMORY:
        setattr(torch.cuda, name, _resident())
    for name, value in _FUNCTIONS.items():
        setattr(torch.cuda, name, value)
    for name, value in _RANDOM.items():
        setattr(torch.cuda, name, value)
        setattr(torch.cuda.random, name, value)
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _nothing(), _nothing()
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.compile = _do_not_compile  # megatron-core uses it at import, and importing the compiler takes 8 s
    DeviceMode().__enter__()


def adapt_megatron() -> None:
    """Make Megatron's per-rank random streams switch the CPU's generator, and recomputed activations be copied.

    Megatron accesses the GPU's generator through private functions. A data loader draws a seed for its workers from the
    CPU's generator, once per epoch and again after a resume. With a GPU that does not change the GPU's generator, and
    here it must not change the CPU's: dropout of a resumed training must equal that of an uninterrupted one.

    Megatron lets recomputed activations share the memory that it has reserved for them with a C++ function. Compiling
    it takes 15 s in every new environment.
    """
    from megatron.core.tensor_parallel import random
    from torch.utils.data import dataloader

    dataloader._BaseDataLoaderIter.__init__ = _keeping_random_state(dataloader._BaseDataLoaderIter.__init__)

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: _set_rng_state(state)
    random._share_storage_ext = SimpleNamespace(share_storage=_copy_storage)


def _keeping_random_state(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_and_restore(*arguments: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            begin(*arguments)

    return begin_and_restore


class DeviceMode(TorchFunctionMode):
    """Mode in which every device that names CUDA becomes the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _BY_POSITION:
            return func(*args)
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        elif func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron sorts tensors into buffers by this name and knows only the CUDA ones.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


# Functions that take or return a device without a keyword.
_BY_POSITION = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type}


def _to_cpu(device):
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return device
    return CPU if isinstance(device, int) or str(device).startswith("cuda") else device


class Stream(contextlib.nullcontext):
    """A stream on which all work is finished."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        super().__init__(self)

    def record_event(self, event=None):
        return event or Event()

    def query(self) -> bool:
        return True

    def wait_stream(self, stream) -> None:
        pass

    wait_event = synchronize = wait_stream


class Event(torch.cpu.Event):
    """A point in time."""

    def __init__(self, *args, **kwargs):
        self.record()

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) * 1e3


def _do_not_compile(model=None, **options):
    return model if model is not None else (lambda function: function)


# A new function object for each name: torch's compiler keeps a table keyed by them and refuses duplicates.
def _nothing():
    return lambda *args, **kwargs: None


def _resident():
    return lambda device=None: psutil.Process().memory_info().rss


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _copy_storage(to: torch.Tensor, of: torch.Tensor) -> None:
    target, source = to.untyped_storage(), of.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)


def _set_rng_state(state: torch.Tensor) -> None:
    """Set the random state. A GPU's checkpoint has 8 bytes of seed and 8 of offset; only the seed is used."""
    if len(state) == 16:
        _set_seed(int.from_bytes(bytes(state[:8].tolist()), "little") & (2**63 - 1))
    else:
        torch.set_rng_state(state)


_PROPERTIES = SimpleNamespace(
    name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=psutil.virtual_memory().total
)

_WITHOUT_EFFECT = ("_lazy_init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "set_stream")
_WITHOUT_EFFECT += ("synchronize",)
_MEMORY = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
_FUNCTIONS = {
    "Event": Event,
    "Stream": Stream,
    "current_device": lambda: CPU,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "device_count": lambda: 1,
    "get_device_capability": lambda device=None: (0, 0),
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: _PROPERTIES,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: False,
    "mem_get_info": lambda device=None: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    "memory_stats": lambda device=None: {},
    "stream": lambda stream: contextlib.nullcontext(),
}

_RANDOM = {
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "manual_seed": _set_seed,
    "manual_seed_all": _nothing(),
    "set_rng_state": lambda state, device=None: _set_rng_state(state),
}
