"""Patch for megatron-core's gated delta nets: they use flash-linear-attention, and keep the released output norm.

The package takes seconds to import, so only families with gated delta nets import it (trainer/patches/import_fixes.py
hides it from all others). On a CPU it is the stand-in of trainer/startup/cpu. Megatron-core centres the weights of all
norms of these models on 0. The released output norm is centred on 1, so Megatron-Bridge subtracts 1 from it, which
rounds bf16 weights; here nothing is subtracted. Remove when megatron-core imports the package in the layer that
needs it, and builds the output norm like transformers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import copy
import sys
from types import ModuleType

from megatron.bridge.models.conversion.param_mapping import AutoMapping
from transformers.utils import import_utils

from trainer.patches import versions
from trainer.patches.families import delta_kernels, row_ends


def show_package() -> None:
    """Let this process import the package, except transformers, which uses torch."""
    import_utils.is_flash_linear_attention_available()  # remembers that it is hidden
    if sys.modules.get("fla", ...) is None:
        del sys.modules["fla"]


def use_kernels(bridge: ModuleType) -> None:
    """Patch megatron-core, and Bridge's module of a family."""
    versions.check(__name__)
    bridge.RMSNorm2ZeroCenteredRMSNormMapping = AutoMapping
    show_package()
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from megatron.core.ssm.gated_delta_net import common, gdn

    delta_kernels.choose_configurations()
    row_ends.install()
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = delta_kernels.by_size(chunk_gated_delta_rule)
    build = common.build_module

    def build_plain(spec, *args, config, **kwargs):
        if "eps" in kwargs:  # the output norm
            config = copy.copy(config)
            config.layernorm_zero_centered_gamma = False
        return build(spec, *args, config=config, **kwargs)

    if build.__name__ != build_plain.__name__:
        common.build_module = build_plain
