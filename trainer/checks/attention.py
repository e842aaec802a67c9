"""Check that this host has an attention kernel for the run. Transformer Engine would end with a stack trace."""

# pyright: reportMissingImports=false

from conf.schema.run import Run
from contract.faults import Fault
from trainer.startup import device

SINKS_IN_PACKED_ROWS = (9, 18, 0)  # first version of cuDNN, according to Transformer Engine 2.20


def check(run: Run, provider) -> None:
    """Raise a Fault for packed rows of a model with sinks (gpt-oss), if the GPU host's cuDNN cannot compute them."""
    if not run.data.packed or getattr(provider, "softmax_type", "vanilla") == "vanilla" or not device.has_gpu():
        return
    if (loaded := cudnn()) < SINKS_IN_PACKED_ROWS:
        needed, here = (".".join(map(str, version)) for version in (SINKS_IN_PACKED_ROWS, loaded))
        raise Fault(
            f"data.packed: true, but attention with sinks needs cuDNN {needed} for packed rows, and this host has "
            f"{here}; install nvidia-cudnn-cu13 of uv.lock (make setup EXTRA=gpu), or set data.packed=false"
        )


def cudnn() -> tuple[int, int, int]:
    """Return the version of cuDNN that Transformer Engine has loaded; torch may be built for another version."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_cudnn_version()
