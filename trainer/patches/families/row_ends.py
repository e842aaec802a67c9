"""Patch for layers that ask the GPU where packed rows end: the host asks once per micro batch, and not in each layer.

Megatron-core's gated delta net asks five times, and flash-linear-attention's scan of Mamba-2 layers four times. The
host waits for the GPU each time, and then the GPU for the host. A step of Qwen3.5-35B on an H100 took 7.4 s, and the
GPU computed for 6.3 s. Remove when neither waits.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from trainer.patches import versions

CHECKED, CHUNKS = "_checked_ends", "_chunks_of_rows"
SCAN = "fla.ops.common.chunk_h"


class Torch(ModuleType):
    """The module torch. It knows without the GPU that a tensor equals itself."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one is other or torch.equal(one, other)


class Offsets(torch.Tensor):
    """Numbers on the GPU; those that are selected come from a copy on the host."""

    on_host: torch.Tensor

    def __getitem__(self, place):
        return self.on_host[place]


def install() -> None:
    """Ask once in gated delta nets and scans of this process."""
    versions.check(__name__)
    if scan := sys.modules.get(SCAN):
        scan.prepare_chunk_offsets = known(scan.prepare_chunk_offsets)  # pyright: ignore[reportAttributeAccessIssue]
    from megatron.core.ssm.gated_delta_net import common, gdn

    if not isinstance(gdn.torch, Torch):
        gdn.torch = Torch(torch.__name__)  # pyright: ignore[reportAttributeAccessIssue]
        common._GDNBase._resolve_cu_seqlens = checked_once(common._GDNBase._resolve_cu_seqlens)


def checked_once(check: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Remember on the ends, which all layers share, that they were checked."""

    @functools.wraps(check)
    def resolve(self, padded: torch.Tensor | None, plain: torch.Tensor, *sizes, **more) -> torch.Tensor:
        ends = plain if padded is None else padded
        if not hasattr(ends, CHECKED):
            check(self, padded, plain, *sizes, **more)
            setattr(ends, CHECKED, True)
        return ends

    return resolve


def known(offsets: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Remember the first chunk of each row, on the ends of the rows."""

    @functools.wraps(offsets)
    def of_rows(ends: torch.Tensor, size: int) -> torch.Tensor:
        if not hasattr(ends, CHUNKS):
            setattr(ends, CHUNKS, {})
        kept: dict[int, Offsets] = getattr(ends, CHUNKS)
        if size not in kept:
            kept[size] = offsets(ends, size).as_subclass(Offsets)
            kept[size].on_host = kept[size].as_subclass(torch.Tensor).cpu()
        return kept[size]

    return of_rows
