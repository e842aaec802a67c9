"""Patch for flash-linear-attention's kernels of gated delta nets: their sizes, and one configuration for each.

Remove when the package computes every size right (https://github.com/fla-org/flash-linear-attention/issues/640), and
tunes nothing.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from trainer.patches import versions
from trainer.startup.cpu.stand_in.fla.ops.gated_delta_rule import chunk_gated_delta_rule


def by_size(kernel: Callable, otherwise: Callable = chunk_gated_delta_rule, value: int = 128) -> Callable:
    """Return the rule that uses the kernel only for keys of 128 and values of `value` numbers of 2 bytes.

    All releases have these sizes.

    On an H100, its gradients of other heads can be wrong: those of queries by 120 % with keys of 32 and values of 128.
    """

    def rule(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, None]:
        usual = (q.shape[-1], v.shape[-1], q.element_size()) == (128, value, 2)
        return (kernel if usual else otherwise)(q, k, v, **more)

    return rule


def choose_configurations() -> None:
    """Choose one configuration for each kernel of the package.

    The package would time up to 48 of them at each new shape: minutes, and another choice, thus another rounding, on
    each rank. On an H100 the chosen ones take at most a few percent of a layer's time more than the fastest.
    """
    versions.check(__name__)
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in vars(module).values():
            while kernel is not None:  # decorators around a kernel
                if isinstance(getattr(kernel, "configs", None), list):
                    kernel.configs = [min(kernel.configs, key=_distance)]
                kernel = getattr(kernel, "fn", None)


def _distance(config) -> tuple[int, int, int]:
    blocks = [size for size in config.kwargs.values() if isinstance(size, int)]
    return abs(config.num_warps - 4), abs(config.num_stages - 3), sum(abs(size - 32) for size in blocks)
