"""Serve a model with an exported adapter that is not merged (evaluate.adapter: unmerged, packed).

vLLM loads paths.model, the release or the codes of a packed base (trainer/weights/exported/packed_format.py), and adds
<paths.export>/adapter to each layer while it answers. For experts the adapter's file has two parameters per layer, as
in transformers. vLLM splits them by expert only if both a setting and the request say so.
"""

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
    """An adapter that is served with its unmerged model."""

    folder: Path
    name: str  # must differ for different weights, because vLLM caches keys and values by this name
    rank: int
    layers: frozenset[str]  # by the last part of their names

    @property
    def experts(self) -> bool:
        return EXPERTS in self.layers

    def settings(self, gpus: int, expert_parallel: bool) -> dict[str, Any]:
        """Settings of vLLM.

        By default each GPU reserves memory for the adapters of all experts; fully_sharded_loras divides this memory.
        Only layers with an adapter are listed, because vLLM gives no log-probabilities of prompts if lm_head is listed.
        """
        values: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.room(gpus)}
        values |= {"lora_target_modules": sorted(self.layers)}
        if self.experts:
            values |= {"enable_mixed_moe_lora_format": True}
            values |= {"fully_sharded_loras": gpus > 1 and not expert_parallel}
        return values

    def room(self, gpus: int = 1) -> int:
        return next(rank for rank in RANKS if rank >= max(self.rank, gpus if self.experts else 1))

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, 1, str(self.folder), is_3d_lora_weight=self.experts)


def is_configured(run: Run) -> bool:
    return run.evaluate.adapter != "merged"


def model(run: Run) -> Path:
    """Folder of the model that vLLM loads."""
    return Path(run.paths.model if is_configured(run) else run.paths.served)


def export(run: Run) -> Path:
    """Folder of the export to which the served model or adapter belongs, if an export wrote it."""
    return Path(run.paths.export) if is_configured(run) else Path(run.paths.served).parent


def mark(run: Run) -> dict[str, Any]:
    """Mark of that export; empty if it has none."""
    content = json_object.read_or_empty(export(run) / "complete.json")
    return content if "formats" in content else {}


def find(run: Run) -> Adapter | None:
    """The adapter to serve with the model, or None. Raises a Fault if vLLM cannot serve it."""
    if not is_configured(run):
        return None
    name = f"{run.name}@{(mark(run).get('trained') or {}).get('weights', 'unmarked')[:16]}"
    return read(export(run) / "adapter", name)


def read(folder: Path, name: str) -> Adapter:
    """The adapter of a folder in PEFT's format; requests use this name for it."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise Fault(f"paths.export: {folder}: no {file}; trainer.export with export.formats=[adapter] writes it")
    config, tensors = json_object.read(folder / CONFIG), safetensors_header.read(folder / WEIGHTS)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= RANKS[-1]:
        raise Fault(f"{folder / CONFIG}: r is {rank!r}; vLLM serves adapters of ranks up to {RANKS[-1]}")
    dora = bool(config.get("use_dora")) or any("lora_magnitude_vector" in name for name in tensors)
    layers = frozenset(_layer(tensor) for tensor in tensors)
    for reason in unadded(dora=dora, latent=LATENT in layers):  # a host without GPUs was refused earlier
        raise Fault(f"{folder}: {reason}; evaluate.adapter=merged")
    return Adapter(folder, name, rank, layers)


def _layer(tensor: str) -> str:
    module = tensor.partition(".lora_")[0].removesuffix(".base_layer")
    return module.rpartition(".")[2]
