"""Frozen weights of Transformer Engine's layers that stay packed and are unpacked for each product.

Transformer Engine asks a weight with the DistributedWeight protocol for the real weight, in the forward pass and again
in the backward pass, and keeps the packed one in between. Its stand-in on a CPU does the same. All weights of a grouped
layer are requested at once, through the first. Unpacked weights exist only during the product.

    layers(chunk)          layers of a model that was built without memory: trainer/patches/checkpoints/base_loading.py
    attach(layer, ...)     replaces a layer's matrices without memory by packed ones
    fill(chunk)            allocates all other parameters that have no memory
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from conf.rules.packed_base import is_packed
from conf.schema.run import Run
from trainer.megatron.packed_base.codes import Codes, shape_of

MATRIX = re.compile(r"weight\d*")
PARTS = "parts_of_base"  # attribute of a layer that was loaded: for each matrix its parts in the base
USUAL = 0.02  # standard deviation of a random matrix
_PASSED_ON = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Store(Codes):
    """Codes that the kernel of their device unpacks."""

    def unpack(self) -> torch.Tensor:
        """Return all matrices as one tensor."""
        if self.codes.is_cuda:
            from trainer.megatron.packed_base.kernel import unpack
        else:
            from trainer.megatron.packed_base.codes import unpack
        return unpack(self)


class PackedWeight(torch.Tensor):
    """Weight with the shape, type and device of a real one, which can only be unpacked."""

    is_distributed_weight = True  # Transformer Engine's marker
    store: Store
    leads: bool  # whether this weight counts the bytes of the whole layer

    @staticmethod
    def __new__(cls, store: Store, leads: bool):
        shape = shape_of(store.codes)[1:]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=store.dtype, device=store.codes.device)
        self.store, self.leads = store, leads
        return self

    def __init__(self, store: Store, leads: bool):
        pass

    @property
    def packed_bytes(self) -> int:
        return self.store.bytes if self.leads else 0

    def materialize_group_for_forward(self, **_: Any) -> list[torch.Tensor]:
        return list(self.store.unpack().unbind())

    materialize_group_for_backward = materialize_group_for_forward

    def finalize_group_grads(self, wgrads: Any = None, **_: Any) -> Any:
        raise AssertionError("a packed weight is frozen, and has no gradient")

    grad_buffer = finalize_group_grads

    def __repr__(self) -> str:
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PASSED_ON:
            return PackedWeight(args[0].store, args[0].leads)
        raise NotImplementedError(f"{func} of a packed weight, which can only be unpacked")


def layers(chunk: nn.Module, run: Run | None = None) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield layers whose matrices have no memory yet and will be packed: name, layer, names of the matrices."""
    for prefix, module in chunk.named_modules():
        if run and not is_packed(run, prefix):
            continue
        bare = {name: value for name, value in module._parameters.items() if value is not None and value.is_meta}
        if names := [name for name, value in bare.items() if value.ndim == 2 and MATRIX.fullmatch(name)]:
            yield prefix, module, names


def attach(layer: nn.Module, names: list[str], store: Store) -> None:
    for name in names:
        old = layer._parameters[name]
        assert old is not None and tuple(old.shape) == shape_of(store.codes)[1:]
        layer._parameters[name] = new = nn.Parameter(PackedWeight(store, name == names[0]), requires_grad=False)
        vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})


def fill(chunk: nn.Module, start: bool = False) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Allocate all other parameters: norms, biases, unpacked matrices; with `start`, set initial values.

    Return each parameter before and after.
    """
    replaced = []
    for module in chunk.modules():
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                module._parameters[name] = new = nn.Parameter(torch.empty_like(old, device="cuda"), requires_grad=False)
                vars(new).update(vars(old))
                if start and old.ndim > 1:
                    new.data.normal_(std=USUAL)
                elif start:
                    new.data.fill_(0.0 if "bias" in name else 1.0)
                replaced.append((old, new))
    return replaced
