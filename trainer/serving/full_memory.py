"""One line for what vLLM says when a GPU has no room for the model, with what helps."""

import re

TAKEN = re.compile(r"Free memory on device \S+ \((\S+)/(\S+) GiB\) on startup is less than .*?, (\S+) GiB\)")
FULL = re.compile(r".*(CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks).*")
SHORT = re.compile(r".*GiB KV cache is needed, which is larger than the available KV cache memory.*")
HELPS = "evaluate.gpus spreads the model over more GPUs, evaluate.quantization=fp8 halves its weights"


def line(said: str) -> str | None:
    """The line for the last of vLLM's complaints about memory in the text; None where it has none."""
    if found := [*TAKEN.finditer(said)]:
        free, whole, asked = found[-1].groups()
        return (
            f"the GPU's memory is taken: {free} of {whole} GiB are free, and an evaluation takes {asked}; "
            "nvidia-smi names the program that has the rest: evaluate again once it has ended"
        )
    if found := [*FULL.finditer(said), *SHORT.finditer(said)]:
        return f"the GPU's memory is full; {HELPS} ({found[-1][0].strip()[:200]})"
    return None
