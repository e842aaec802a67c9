"""Settings with which vLLM starts: CUDA graphs or not, the cache for the next start, the memory for prompts.

On an H200 a model of 9.6 GB answers after 52 s. This includes 19 s for torch's compilation and 15 s for CUDA graphs. An
evaluation with few rows starts without both. Otherwise compiled code is kept in paths.kernels for the next start.
vLLM's cache key contains the model's path. Therefore the model is loaded through a link whose name depends only on its
config.json and precision.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from conf.model_facts import facts_from_hf
from conf.model_files import config_json
from conf.planner.serving import memory
from conf.planner.serving.layout import is_eager, power_of_two, row, rows_together
from conf.rules.serving import BYTES
from conf.schema.run import Run
from contract import checksums
from contract.faults import Fault
from contract.ownership import held
from trainer.serving import unmerged


def settings(run: Run, length: int, precision: str, cpu: bool) -> dict[str, Any]:
    """Settings of vLLM for the run, the longest sequence and the precision; the planner assumes the same ones."""
    sequences = rows_together(run.evaluate)
    values: dict[str, Any] = {"max_model_len": length, "max_num_seqs": sequences}
    if cpu:
        return values | {"enforce_eager": True}
    if is_eager(run.evaluate):
        values |= {"enforce_eager": True, "optimization_level": 0}  # level 0 also skips measuring kernels
    tokens = memory.tokens_of_a_step(facts_from_hf(_config(run)), BYTES[precision], sequences)
    return values | {"max_num_batched_tokens": tokens, "gpu_memory_utilization": memory.UTILIZATION}


def length(run: Run) -> int:
    """Longest sequence of prompt and answer.

    It is rounded up to a power of two, if the model has as many positions, because vLLM's cache key contains it.
    """
    needed = row(run)
    return min(power_of_two(needed), positions(run) or needed)


def positions(run: Run) -> int | None:
    """Highest number of tokens that the served model can read, if its config.json has one."""
    config = _config(run)
    return config.get("max_position_embeddings") or config.get("n_positions")  # GPT-2's name


def _config(run: Run) -> dict[str, Any]:
    return config_json.read(unmerged.model(run) / config_json.NAME)


def environment(kernels: Path) -> dict[str, str]:
    """Environment variables for the caches of compiled kernels of vLLM and Triton."""
    return {"VLLM_CACHE_ROOT": str(kernels / "vllm"), "TRITON_CACHE_DIR": str(kernels / "triton")}


@contextlib.contextmanager
def fixed_name(kernels: Path, model: Path, precision: str) -> Iterator[Path]:
    """Context with a link to the model, whose path is the same for all models with its config.json and precision.

    A lock reserves the path: a second evaluation of the same shape on this host gets another one. If no link can be
    created, the path is the model's own.
    """
    config = (model / config_json.NAME).read_bytes()
    folder = kernels / "served" / checksums.of(config + precision.encode())[:16]
    with contextlib.ExitStack() as stack:
        try:
            link = _linked(folder, model.resolve(), stack)
        except OSError:  # the disk is full, the folder belongs to somebody else, or the file system has no locks
            link = model
        yield link
        if link.resolve() != model.resolve():
            raise Fault(f"{link}: another process has changed this link; evaluate again with another paths.kernels")


def _linked(folder: Path, model: Path, stack: contextlib.ExitStack) -> Path:
    """Create the first link in the folder that is not locked. It stays locked until the stack is closed."""
    for number in count():
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(BlockingIOError):
            stack.enter_context(held(place / "lock", os.O_RDWR | os.O_CREAT))
            link = place / "model"
            link.unlink(missing_ok=True)
            link.symlink_to(model, target_is_directory=True)
            return link
    raise AssertionError
