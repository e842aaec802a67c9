"""Settings that vLLM is started with: graphs or none, what it keeps for the next start, the room that prompts take.

On an H200 a model of 9.6 GB answers after 52 s, of which 19 s are torch's compilation and 15 s graphs. Who asks little
starts without both. Who asks more finds them again: they are kept in paths.kernels, under a key of which the model's
path is a part, so that a GPU reads each model by a link whose name follows from its config.json alone.
"""

import contextlib
import fcntl
import hashlib
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
from contract.faults import Fault
from trainer.serving import unmerged


def settings(run: Run, length: int, precision: str, cpu: bool) -> dict[str, Any]:
    """Settings of vLLM that follow from the run, the longest sequence and the precision, as the plan counts on them."""
    sequences = rows_together(run.evaluate)
    found: dict[str, Any] = {"max_model_len": length, "max_num_seqs": sequences}
    if cpu:
        return found | {"enforce_eager": True}
    if is_eager(run.evaluate, sequences):
        found |= {"enforce_eager": True, "optimization_level": 0}  # which also skips measuring kernels
    tokens = memory.tokens_of_a_step(facts_from_hf(_config(run)), BYTES[precision], sequences)
    return found | {"max_num_batched_tokens": tokens, "gpu_memory_utilization": memory.UTILIZATION}


def length(run: Run) -> int:
    """Longest sequence of prompt and answer.

    It is part of the key of what vLLM keeps, so that it is a power of two where the model reads as many tokens.
    """
    needed = row(run)
    config = _config(run)
    most = config.get("max_position_embeddings") or config.get("n_positions")  # GPT-2's name
    return min(power_of_two(needed), most or needed)


def _config(run: Run) -> dict[str, Any]:
    return config_json.read(unmerged.model(run) / config_json.NAME)


def environment(kernels: Path) -> dict[str, str]:
    """Variables that say where vLLM and Triton keep what they have compiled."""
    return {"VLLM_CACHE_ROOT": str(kernels / "vllm"), "TRITON_CACHE_DIR": str(kernels / "triton")}


@contextlib.contextmanager
def fixed_name(kernels: Path, model: Path, precision: str) -> Iterator[Path]:
    """A path of the model that is the same for all models of its config.json and precision, while the block runs.

    Nobody else has that path meanwhile: the second evaluation of the same shape on this host gets another one. Where no
    link can be made, it is the model's own path.
    """
    config = (model / config_json.NAME).read_bytes()
    folder = kernels / "served" / hashlib.sha256(config + precision.encode()).hexdigest()[:16]
    try:
        descriptor, link = _linked(folder, model.resolve())
    except OSError:  # no room, a folder of somebody else's, or a file system without locks
        yield model
        return
    try:
        yield link
        if link.resolve() != model.resolve():
            raise Fault(f"{link}: another process has changed it; evaluate again, with another paths.kernels")
    finally:
        os.close(descriptor)


def _linked(folder: Path, model: Path) -> tuple[int, Path]:
    """Make the first link in the folder that nobody has. It is had as long as the descriptor is open."""
    for number in count():
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            link = place / "model"
            link.unlink(missing_ok=True)
            link.symlink_to(model, target_is_directory=True)
            return descriptor, link
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
    raise AssertionError
