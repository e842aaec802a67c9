"""The copies from buckets to vLLM's parameters, seen while vLLM loads a model, so that they are made again at once.

vLLM's loaders take a tenth of a millisecond of Python for a tensor: each looks for its parameter by its name, takes its
worker's part, and waits for the rest of its layer. In the end numbers are copied, from where they lie in a bucket to
where they lie in a parameter. Where nothing else is done to them, these copies are all that a later transfer needs:

1. While the first transfer is loaded, every copy is noted, and what is in a parameter afterwards is held against what
   was copied there: a layer that swaps or packs its weights has something else.
2. The second is loaded as the first. What no copy has gone to has to be as before: where it is not, vLLM has computed
   it of the weights, and would have to do so again.
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
ELSEWHERE = "layers keep their weights in another form"  # as those of a CPU do
CACHES = ("kv_cache",)  # attributes of vLLM's layers that hold no weights


@dataclass(frozen=True)
class Form:
    """Numbers within a piece of memory."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int  # of bytes in a bucket, of numbers elsewhere

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def is_like(self, target: torch.Tensor) -> bool:
        """Whether these numbers lie as those of the target do."""
        return (self.dtype, self.shape, self.strides) == (target.dtype, target.shape, target.stride())

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The numbers themselves, of a bucket's bytes."""
        numbers = memory.view(self.dtype)
        first = numbers.storage_offset() + self.offset // self.dtype.itemsize
        return numbers.as_strided(self.shape, self.strides, first)


@dataclass(frozen=True)
class Copy:
    """Numbers of a bucket, and where they go."""

    bucket: int
    source: Form
    target: Form
    total: torch.Tensor  # digest of the numbers


@dataclass
class Loading:
    """Copies of a transfer."""

    copies: dict[int, list[tuple[Form, torch.Tensor]]] = field(default_factory=lambda: defaultdict(list))
    together: dict[int, Any] = field(default_factory=dict)  # those that one kernel takes, by bucket
    refused: str = ""  # why they do not do

    def put(self, bucket: int, memory: torch.Tensor) -> None:
        """Put the numbers of a bucket to where they go."""
        if memory.is_cuda and bucket not in self.together:
            self._take_together(bucket)
        if together := self.together.get(bucket):
            together.empty(memory)
        if copies := self.copies.get(bucket):
            with torch.inference_mode():  # vLLM may have made its parameters in it
                torch._foreach_copy_([target for _, target in copies], [source.within(memory) for source, _ in copies])

    def _take_together(self, bucket: int) -> None:
        """Have one kernel copy what is whole on both sides: most of a model, if not all."""
        from trainer.reinforcement.transfer.repeated.kernels import Copies

        whole, rest = [], []
        for form, target in self.copies.get(bucket, []):
            is_whole = form.is_like(target) and Copies.has(form.offset, target)
            (whole if is_whole else rest).append((form, target))
        self.copies[bucket] = rest
        places, targets = [form.offset for form, _ in whole], [target for _, target in whole]
        self.together[bucket] = Copies(places, targets) if whole else None

    def filled(self) -> dict[int, int]:
        """The count of numbers that go to each piece of memory."""
        found: dict[int, int] = defaultdict(int)
        apart = (target for copies in self.copies.values() for _, target in copies)
        whole = (target for together in self.together.values() if together for target in together.tensors)
        for target in chain(apart, whole):
            found[target.untyped_storage().data_ptr()] += target.numel()
        return found


@dataclass
class Layer:
    """A layer's tensor while it is loaded: the copies to it, as long as its memory is there."""

    held: StorageWeakRef
    copies: list[Copy] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Notes of what is copied from buckets to the parameters of a model, while it is entered.

    Places in memory are given to one tensor after another: what is known of one ends with it.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.found = Loading()
        self._kept = {one.untyped_storage().data_ptr() for one in _registered(model) if one.numel()}
        self._buckets: dict[int, tuple[int, int, StorageWeakRef]] = {}  # by memory: number, first byte, and the memory
        self._layers: dict[int, Layer] = {}  # by memory
        self._totals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrived(self, bucket: int, memory: torch.Tensor) -> None:
        """Have this be a bucket's memory, as long as it is there."""
        storage = memory.untyped_storage()
        self._buckets[storage.data_ptr()] = bucket, memory.data_ptr(), StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is COPY and not self.found.refused and not args[0].is_meta and not args[1].is_meta:
            self._note(args[0], args[1])
        return result

    def ended(self) -> Loading:
        """All copies, once the model is whole. They do not do where a layer has something else than was copied."""
        found = self.found
        if self._layers:
            self._refuse(ELSEWHERE)
        if self._totals and not found.refused:
            off = torch.stack([one for one, _ in self._totals]) != torch.stack([other for _, other in self._totals])
            if bool(off.any()):
                self._refuse(f"{int(off.sum())} tensors are in another order within their layers")
        self._layers.clear()
        self._totals.clear()
        return found

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        into, out = target.untyped_storage(), source.untyped_storage()
        bucket, first, held = self._buckets.get(out.data_ptr(), (0, 0, None))
        layer = self._layers.get(out.data_ptr())
        if layer and layer.held.expired():
            self._refuse(ELSEWHERE)
        elif layer and into.data_ptr() in self._kept:
            self._take(self._layers.pop(out.data_ptr()), Form.of(source), target)
        elif held and not held.expired():
            form = Form(source.dtype, source.shape, source.stride(), source.data_ptr() - first)
            if target.shape != source.shape:
                self._refuse("one number is copied to many places")
                return
            copy = Copy(bucket, form, Form.of(target), _total(source.to(target.dtype)))
            if into.data_ptr() in self._kept:
                self._keep(copy, target)
                return
            layer = self._layers.setdefault(into.data_ptr(), Layer(StorageWeakRef(into)))
            if layer.held.expired():
                self._refuse(ELSEWHERE)
            layer.copies.append(copy)

    def _take(self, layer: Layer, whole: Form, target: torch.Tensor) -> None:
        """Take the copies to a layer's tensor for copies to the parameter that it is copied to."""
        found = Form.of(target)
        if (whole.dtype, whole.shape, whole.strides) != (found.dtype, found.shape, found.strides):
            self._refuse("a layer has its weights in another form")
            return
        for copy in layer.copies:
            place = copy.target.offset - whole.offset + found.offset
            self._keep(copy, target.as_strided(copy.target.shape, copy.target.strides, place))

    def _keep(self, copy: Copy, target: torch.Tensor) -> None:
        target = target.detach()
        self.found.copies[copy.bucket].append((copy.source, target))
        self._totals.append((copy.total, _total(target)))

    def _refuse(self, why: str) -> None:
        self.found.refused = self.found.refused or why


class Learned:
    """The copies of the first transfer, and whether they do."""

    def __init__(self, model: torch.nn.Module, loading: Loading):
        self.loading, self._proven = loading, False
        self._before = {} if loading.refused else _totals(self._untouched(model))

    def hold_against(self, model: torch.nn.Module) -> None:
        """Look at a model that was loaded once more, with other weights."""
        if self._proven or self.loading.refused:
            return
        now = _totals(self._untouched(model))
        changed = next(
            (name for name in self._before.keys() | now.keys() if self._before.get(name) != now.get(name)), ""
        )
        if changed:
            self._refuse(f"{changed} is computed of weights")
        self._proven = True

    def refused(self, model: torch.nn.Module, sleeps: bool) -> str:
        """The reason that the copies do not do; empty where they do. Asleep, vLLM keeps buffers and nothing else."""
        if sleeps and self._proven and not self.loading.refused:
            kept, partly = {name for name, _ in model.named_buffers()}, self.loading.filled()
            for name, tensor in self._untouched(model).items():
                if name not in kept and not partly[tensor.untyped_storage().data_ptr()]:
                    self._refuse(f"{name} is not kept asleep")
        return self.loading.refused or ("" if self._proven else "the copies of one transfer are no proof")

    def _refuse(self, why: str) -> None:
        self.loading.refused = self.loading.refused or why
        self.loading.copies.clear()

    def _untouched(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Tensors of a model that no copy goes to, or not to all of, by name; those that lie where its weights do."""
        filled, where = self.loading.filled(), next(model.parameters()).device
        return {
            name: one
            for name, one in _all_tensors(model)
            if one.numel() and one.device == where and filled[one.untyped_storage().data_ptr()] < one.numel()
        }


def _registered(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, and what a layer has besides as an attribute."""
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
    return dict(zip(tensors, (int(_total(one)) for one in tensors.values()), strict=True))
