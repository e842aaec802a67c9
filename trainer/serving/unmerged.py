"""The released model with an exported adapter beside it, as vLLM serves it (evaluate.adapter=unmerged).

Nothing as large as the model is written: paths.model is served, and <paths.export>/adapter is added to each layer while
it answers. Of experts our file has transformers' two parameters a layer, which vLLM splits by expert where it is told
so twice, by a setting and by the request.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.model_files import safetensors_header
from conf.planner.serving.memory import RANKS
from conf.rules.serving import LATENT, unadded
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERTS = "experts"


@dataclass(frozen=True)
class Adapter:
    """An adapter that is served beside its model."""

    folder: Path
    name: str  # a new one for other weights: vLLM keeps keys and values by it
    rank: int
    layers: frozenset[str]  # by the last part of their names

    @property
    def experts(self) -> bool:
        return EXPERTS in self.layers

    def settings(self, gpus: int, expert_parallel: bool) -> dict[str, Any]:
        """Settings of vLLM.

        Memory for experts is set aside on each GPU for all of them, unless it is cut as well. Layers that have no
        adapter are named by leaving them out: with one on lm_head, vLLM gives no log-probabilities of prompts.
        """
        found: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.room(gpus)}
        found |= {"lora_target_modules": sorted(self.layers)}
        if self.experts:
            found |= {"enable_mixed_moe_lora_format": True}
            found |= {"fully_sharded_loras": gpus > 1 and not expert_parallel}
        return found

    def room(self, gpus: int = 1) -> int:
        return next(rank for rank in RANKS if rank >= max(self.rank, gpus if self.experts else 1))

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, 1, str(self.folder), is_3d_lora_weight=self.experts)


def is_asked(run: Run) -> bool:
    return run.evaluate.adapter == "unmerged"


def model(run: Run) -> Path:
    """Folder of the model that vLLM loads."""
    return Path(run.paths.model if is_asked(run) else run.paths.served)


def export(run: Run) -> Path:
    """Folder of the export that the served model or adapter is part of, if it is of one."""
    return Path(run.paths.export) if is_asked(run) else Path(run.paths.served).parent


def mark(run: Run) -> dict[str, Any]:
    """Mark of that export; empty where there is none."""
    try:
        found = json.loads((export(run) / "complete.json").read_text())
        return found if "formats" in found else {}
    except (OSError, ValueError, TypeError):
        return {}


def find(run: Run) -> Adapter | None:
    """The adapter that is to be served beside the model, if one is. Raises a Fault where it is unfit."""
    if not is_asked(run):
        return None
    name = f"{run.name}@{(mark(run).get('trained') or {}).get('weights', 'unmarked')[:16]}"
    return read(export(run) / "adapter", name)


def read(folder: Path, name: str) -> Adapter:
    """The adapter of a folder in PEFT's format, to be asked for by this name."""
    config, tensors = _read(folder)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= RANKS[-1]:
        raise Fault(f"{folder / CONFIG}: r is {rank!r}; vLLM serves adapters of ranks up to {RANKS[-1]}")
    dora = bool(config.get("use_dora")) or any("lora_magnitude_vector" in name for name in tensors)
    layers = frozenset(_layer(tensor) for tensor in tensors)
    for reason in unadded(dora=dora, latent=LATENT in layers):  # hosts without GPUs are refused before
        raise Fault(f"{folder}: {reason}; evaluate.adapter=merged")
    return Adapter(folder, name, rank, layers)


def _layer(tensor: str) -> str:
    module = tensor.partition(".lora_")[0].removesuffix(".base_layer")
    return module.rpartition(".")[2]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise Fault(f"paths.export: {folder}: no {name}; trainer.export with export.formats=[adapter] makes it")
    return json_object.read(folder / CONFIG), safetensors_header.read(folder / WEIGHTS)
