"""Record vLLM's copies from buckets to parameters while it loads a model, to repeat them directly in later transfers.

vLLM's loaders take a tenth of a millisecond of Python for a tensor: each finds its parameter by name, takes its
worker's part, and waits for the rest of its layer. In the end they copy numbers from a bucket to a parameter. If they
do nothing else with them, a later transfer only needs these copies:

1. While vLLM loads the first transfer, every copy is recorded. Afterwards the content of each parameter is compared
   with the copied numbers: it differs if a layer swaps or packs its weights.
2. vLLM loads the second transfer in the same way. Tensors without copies must not have changed. If they have, vLLM
   computes them from the weights, and would have to compute them again after each transfer.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.weights import digests

COPY = torch.ops.aten.copy_.default
ELSEWHERE = "layers keep their weights in another form"  # for example on a CPU
CACHES = ("kv_cache",)  # attributes of vLLM's layers that hold no weights


@dataclass(frozen=True)
class Form:
    """Type, shape and place of numbers within a piece of memory."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int  # bytes in a bucket, numbers elsewhere

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def is_like(self, target: torch.Tensor) -> bool:
        """Whether the numbers of the target have the same type, shape and strides."""
        return (self.dtype, self.shape, self.strides) == (target.dtype, target.shape, target.stride())

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The numbers, as a view of a bucket's bytes."""
        numbers = memory.view(self.dtype)
        first = numbers.storage_offset() + self.offset // self.dtype.itemsize
        return numbers.as_strided(self.shape, self.strides, first)


@dataclass(frozen=True)
class Copy:
    """Numbers of a bucket, and their target."""

    bucket: int
    source: Form
    target: Form
    total: torch.Tensor  # digest of the numbers


@dataclass
class Learned:
    """The copies of the first transfer, and whether they are enough for later ones."""

    copies: dict[int, list[tuple[Form, torch.Tensor]]] = field(default_factory=lambda: defaultdict(list))
    together: dict[int, Any] = field(default_factory=dict)  # copies that one kernel makes, by bucket
    refusal: str = ""  # reason why the copies are not enough
    proven: bool = False  # by a second transfer
    totals: dict[str, int] = field(default_factory=dict)  # digests of tensors that the copies do not fill

    def put(self, bucket: int, memory: torch.Tensor) -> None:
        """Copy the numbers of a bucket to their targets."""
        if memory.is_cuda and bucket not in self.together:
            self._join(bucket)
        if together := self.together.get(bucket):
            together.empty(memory)
        if copies := self.copies.get(bucket):
            with torch.inference_mode():  # vLLM may have created its parameters in this mode
                torch._foreach_copy_([target for _, target in copies], [source.within(memory) for source, _ in copies])

    def _join(self, bucket: int) -> None:
        """Let one kernel make all copies that are contiguous on both sides: most or all of a model."""
        from trainer.reinforcement.transfer.repeated.kernels import Copies

        whole, rest = [], []
        for form, target in self.copies.get(bucket, []):
            is_whole = form.is_like(target) and Copies.has(form.offset, target)
            (whole if is_whole else rest).append((form, target))
        self.copies[bucket] = rest
        places, targets = [form.offset for form, _ in whole], [target for _, target in whole]
        self.together[bucket] = Copies(places, targets) if whole else None

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason
        self.copies.clear()

    def compare(self, model: torch.nn.Module) -> None:
        """Check a model that was loaded again with other weights: tensors without copies must not have changed."""
        if self.proven or self.refusal:
            return
        now = _totals(self.untouched(model))
        changed = [name for name in self.totals.keys() | now.keys() if self.totals.get(name) != now.get(name)]
        if changed:
            self.refuse(f"{changed[0]} is computed from weights")
        self.proven = True

    def refused(self, model: torch.nn.Module, sleeps: bool) -> str:
        """The reason why the copies are not enough, or "". While vLLM sleeps, it keeps only buffers."""
        if sleeps and self.proven and not self.refusal:
            buffers, counts = {name for name, _ in model.named_buffers()}, self._filled()
            for name, tensor in self.untouched(model).items():
                if name not in buffers and not counts[tensor.untyped_storage().data_ptr()]:
                    self.refuse(f"{name} is not kept while vLLM sleeps")
        return self.refusal or ("" if self.proven else "one transfer proves nothing")

    def untouched(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Tensors of a model, on the device of its weights, that the copies do not fill completely; by name."""
        filled, device = self._filled(), next(model.parameters()).device
        return {
            name: tensor
            for name, tensor in _all_tensors(model)
            if tensor.numel()
            and tensor.device == device
            and filled[tensor.untyped_storage().data_ptr()] < tensor.numel()
        }

    def _filled(self) -> dict[int, int]:
        """The number of copied numbers for each piece of memory."""
        counts: dict[int, int] = defaultdict(int)
        single = (target for copies in self.copies.values() for _, target in copies)
        joined = (target for together in self.together.values() if together for target in together.tensors)
        for target in chain(single, joined):
            counts[target.untyped_storage().data_ptr()] += target.numel()
        return counts


@dataclass
class Layer:
    """A layer's temporary tensor during loading, and the copies to it; valid while its memory exists."""

    held: StorageWeakRef
    copies: list[Copy] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Record of the copies from buckets to the parameters of a model, while this context is active.

    Memory is reused for other tensors: a record of an address is only valid while its tensor exists.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.learned, self._model = Learned(), model
        tensors = chain(model.parameters(), model.buffers())
        self._registered = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        self._buckets: dict[int, tuple[int, int, StorageWeakRef]] = {}  # by memory: number, first byte, and the memory
        self._layers: dict[int, Layer] = {}  # by memory
        self._totals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrived(self, bucket: int, memory: torch.Tensor) -> None:
        """Remember this memory as a bucket's, while it exists."""
        storage = memory.untyped_storage()
        self._buckets[storage.data_ptr()] = bucket, memory.data_ptr(), StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is COPY and not self.learned.refusal and not args[0].is_meta and not args[1].is_meta:
            self._note(args[0], args[1])
        return result

    def ended(self) -> Learned:
        """All copies, after the model is complete. They are refused if a layer's content differs from the copies."""
        if self._layers:
            self.learned.refuse(ELSEWHERE)
        if self._totals and not self.learned.refusal:
            copied, actual = (torch.stack(column) for column in zip(*self._totals, strict=True))
            if bool((copied != actual).any()):
                count = int((copied != actual).sum())
                self.learned.refuse(f"{count} tensors are in another order within their layers")
        if not self.learned.refusal:
            self.learned.totals = _totals(self.learned.untouched(self._model))
        return self.learned

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        into, out = target.untyped_storage(), source.untyped_storage()
        bucket, first, held = self._buckets.get(out.data_ptr(), (0, 0, None))
        layer = self._layers.get(out.data_ptr())
        if layer and layer.held.expired():
            self.learned.refuse(ELSEWHERE)
        elif layer and into.data_ptr() in self._registered:
            self._forward(self._layers.pop(out.data_ptr()), Form.of(source), target)
        elif held and not held.expired():
            form = Form(source.dtype, source.shape, source.stride(), source.data_ptr() - first)
            if target.shape != source.shape:
                self.learned.refuse("one number is copied to many places")
                return
            copy = Copy(bucket, form, Form.of(target), _total(source.to(target.dtype)))
            if into.data_ptr() in self._registered:
                self._add(copy, target)
                return
            layer = self._layers.setdefault(into.data_ptr(), Layer(StorageWeakRef(into)))
            if layer.held.expired():
                self.learned.refuse(ELSEWHERE)
            layer.copies.append(copy)

    def _forward(self, layer: Layer, whole: Form, target: torch.Tensor) -> None:
        """Record the copies to a layer's temporary tensor as copies to the parameter to which it is copied."""
        if not whole.is_like(target):
            self.learned.refuse("a layer has its weights in another form")
            return
        for copy in layer.copies:
            place = copy.target.offset - whole.offset + int(target.storage_offset())
            self._add(copy, target.as_strided(copy.target.shape, copy.target.strides, place))

    def _add(self, copy: Copy, target: torch.Tensor) -> None:
        target = target.detach()
        self.learned.copies[copy.bucket].append((copy.source, target))
        self._totals.append((copy.total, _total(target)))


def _all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are other attributes of layers."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name not in CACHES:
                yield f"{prefix}.{name}", value


def _total(tensor: torch.Tensor) -> torch.Tensor:
    return digests.sums(tensor, (0,) * tensor.ndim)


def _totals(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Digests of tensors, by name."""
    return {name: int(_total(tensor)) for name, tensor in tensors.items()}
