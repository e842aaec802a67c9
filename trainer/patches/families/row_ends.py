"""Patch for megatron-core's gated delta nets with packed rows: check once per micro batch where the rows end.

Megatron-core checks it in every layer, and the host waits for the GPU five times each. A step of Qwen3.5-35B on an H100
took 7.4 s, of which the GPU computed 6.3 s. Remove when core's layer waits for nothing.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from trainer.patches import versions

CHECKED = "_checked_ends"


class Torch(ModuleType):
    """torch, which knows without asking the GPU that a tensor equals itself."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one is other or torch.equal(one, other)


def install() -> None:
    """Check once in this process."""
    versions.check(__name__)
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
