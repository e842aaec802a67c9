"""Whether this host has attention for what a run asks of it. Transformer Engine would end in a stack trace."""

# pyright: reportMissingImports=false

from conf.schema.run import Run
from contract.faults import Fault
from trainer.startup import device

SINKS_IN_PACKED_ROWS = (9, 18, 0)  # cuDNN's; as Transformer Engine 2.20 has it


def check(run: Run, provider) -> None:
    """Refuse packed rows of a model with sinks (gpt-oss) on a GPU host whose cuDNN has no attention for them."""
    if not run.data.packed or getattr(provider, "softmax_type", "vanilla") == "vanilla" or not device.has_gpu():
        return
    if (found := cudnn()) < SINKS_IN_PACKED_ROWS:
        least, here = (".".join(map(str, version)) for version in (SINKS_IN_PACKED_ROWS, found))
        raise Fault(
            f"data.packed: true, but attention with sinks takes packed rows from cuDNN {least} on, and this host's is "
            f"{here}; take nvidia-cudnn-cu13 of uv.lock (make setup EXTRA=gpu), or data.packed=false"
        )


def cudnn() -> tuple[int, int, int]:
    """Version that Transformer Engine has loaded, which need not be the one that torch was built for."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_cudnn_version()
