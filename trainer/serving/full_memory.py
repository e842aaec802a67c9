"""One line with advice, in place of vLLM's messages about a GPU that has too little memory for the model."""

import re

TAKEN = re.compile(r"Free memory on device \S+ \((\S+)/(\S+) GiB\) on startup is less than .*?, (\S+) GiB\)")
FULL = re.compile(r".*(CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks).*")
SHORT = re.compile(r".*GiB KV cache is needed, which is larger than the available KV cache memory.*")
HELPS = "evaluate.gpus spreads the model over more GPUs, evaluate.quantization=fp8 halves its weights"


def line(log: str) -> str | None:
    """The line for vLLM's last message about memory in its log; None if the log has none."""
    if matches := [*TAKEN.finditer(log)]:
        free, whole, needed = matches[-1].groups()
        return (
            f"the GPU's memory is taken: {free} of {whole} GiB are free, and an evaluation needs {needed}; "
            "nvidia-smi names the program that has the rest: evaluate again once it has ended"
        )
    if matches := [*FULL.finditer(log), *SHORT.finditer(log)]:
        return f"the GPU's memory is full; {HELPS} ({matches[-1][0].strip()[:200]})"
    return None
