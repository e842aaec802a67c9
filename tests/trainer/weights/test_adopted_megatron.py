"""trainer/weights/adopted: checkpoints with the names of Megatron-LM and NeMo 2, and of older megatron-core."""

import pickle
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.weights import torch_dist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NORM = "mlp.linear_fc1.layer_norm_weight"


def optimizer(state: dict) -> dict:
    return {f"chained_1.optimizer.state.exp_avg.{key}": torch.ones_like(tensor) for key, tensor in state.items()}


WRITERS = {
    "Megatron-LM without Transformer Engine": lambda s: {k.replace("pre_mlp_layernorm.weight", NORM): s[k] for k in s},
    "NeMo 2": lambda s: {f"module.{key}": tensor for key, tensor in s.items()},
    "an optimizer in parts": lambda s: s | optimizer(s),
}


@pytest.fixture
def source(configure, base, work, tmp_path):
    """A folder with config.json, and the tensors of its model by the keys in Megatron's checkpoint."""
    base("qwen3-moe")
    place = work / "qwen3-moe-base/iter_0000000"
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in torch_dist.open_checkpoint(place).metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=place, no_dist=True)
    (tmp_path / "source").mkdir()
    shutil.copyfile(work / "qwen3-moe/config.json", tmp_path / "source/config.json")
    return SimpleNamespace(folder=tmp_path / "source", state=state, model=tensors(work / "qwen3-moe"))


def tensors(folder: Path) -> dict:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict | None = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: dict | None = None


def describe_as_before(place: Path, monkeypatch) -> None:
    """Write the description as megatron-core before 0.19, which adds the plan of each rank to torch's."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MCoreMetadata=MCoreMetadata, MCoreSavePlan=MCoreSavePlan))
    for kind in (MCoreMetadata, MCoreSavePlan):
        monkeypatch.setattr(kind, "__module__", name)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    plan = MCoreSavePlan([WriteItem(MetadataIndex("x"), WriteItemType.SHARD)])
    own = {field.name: getattr(metadata, field.name) for field in fields(Metadata)}
    described = MCoreMetadata(**own, mcore_data={})
    described.all_local_plans = [plan]
    (place / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.parametrize("writer", WRITERS)
def test_it_is_its_model(writer, source, as_bridge, tmp_path, monkeypatch):
    save(WRITERS[writer](source.state), checkpoint_id=source.folder / "weights", no_dist=True)
    describe_as_before(source.folder / "weights", monkeypatch)
    assert as_bridge(tmp_path, "adopted", source=str(source.folder), out=str(tmp_path / "out")) == ""
    made = tensors(tmp_path / "out")
    assert made.keys() == source.model.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in source.model.items())


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(source, as_bridge, tmp_path):
    def refusal(change: dict) -> str:
        state = {key: tensor for key, tensor in (source.state | change).items() if tensor is not None}
        shutil.rmtree(source.folder / "weights", ignore_errors=True)
        save(state, checkpoint_id=source.folder / "weights", no_dist=True)
        return as_bridge(tmp_path, "adopted", source=str(source.folder), out=str(tmp_path / "out"))

    assert "1 are missing: model.norm.weight; 0 have" in refusal({"decoder.final_layernorm.weight": None})
    assert "have no place: decoder.extra.weight" in refusal({"decoder.extra.weight": torch.ones(2)})
    wrong = refusal({"decoder.final_layernorm.weight": torch.ones(7)})
    assert "tensors of the wrong shape (1): decoder.final_layernorm.weight is [7] and should be" in wrong
