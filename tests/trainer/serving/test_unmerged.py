"""trainer/serving/unmerged.py: which adapters are served beside their base, and with what settings."""

import json
import struct
from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.serving import unmerged

DENSE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EXPERTS = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
SHARED = "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_A.weight"


@pytest.fixture
def exported(tmp_path):
    """exported(names, **config) -> the adapter of an export with these tensors and keys."""

    def exported(*names: str, **config: object):
        folder = tmp_path / "export/adapter"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 16, "use_dora": False} | config))
        header = {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))
        mark = {"step": 6, "formats": ["adapter"], "trained": {"weights": "abc" * 20, "prompts": 8}}
        (folder.parent / "complete.json").write_text(json.dumps(mark))
        return unmerged.find(asked(tmp_path))

    return exported


def asked(tmp_path: Path, adapter: str = "unmerged"):
    paths = [f"paths.model={tmp_path}/model", f"paths.export={tmp_path}/export"]
    return load("tiny", [*paths, f"paths.served={tmp_path}/export/merged", f"evaluate.adapter={adapter}"])


def test_the_released_model_is_served_with_the_adapter_and_else_the_merged_one(exported, tmp_path):
    found = exported(DENSE)
    assert found.folder == tmp_path / "export/adapter" and found.name == "tiny@abcabcabcabcabca" and not found.experts
    run, merged = asked(tmp_path), asked(tmp_path, "merged")
    assert unmerged.model(run) == tmp_path / "model" and unmerged.model(merged) == tmp_path / "export/merged"
    assert unmerged.mark(run)["step"] == unmerged.mark(merged)["step"] == 6
    assert unmerged.find(merged) is None


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (33, 64), (400, 512)])
def test_memory_is_set_aside_for_the_next_rank_that_vllm_knows(rank, room, exported):
    settings = exported(DENSE, DENSE.replace("_A", "_B"), r=rank).settings(1, False)
    expected = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    assert settings == expected | {"lora_target_modules": ["q_proj"]}


def test_experts_are_announced_and_their_memory_is_cut(exported):
    found = exported(DENSE, EXPERTS, SHARED, r=4)
    assert found.experts and not exported(SHARED).experts
    assert found.settings(1, False)["lora_target_modules"] == ["experts", "q_proj", "up_proj"]
    assert found.settings(1, False)["enable_mixed_moe_lora_format"]
    assert [found.settings(*cut)["fully_sharded_loras"] for cut in ((1, False), (8, False), (8, True))] == [0, 1, 0]
    assert found.settings(16, False)["max_lora_rank"] == 16  # so many pieces


@pytest.mark.parametrize(
    ("names", "config", "fault"),
    [
        ([DENSE], {"r": 0}, r"r is 0; vLLM serves adapters of ranks up to 512"),
        ([DENSE], {"r": 513}, r"r is 513"),
        ([DENSE], {"r": True}, r"r is True"),
        ([DENSE], {"r": "16"}, r"r is '16'"),
        ([DENSE], {"use_dora": True}, r"DoRA scales the weight; evaluate\.adapter=merged"),
        ([DENSE.replace("lora_A.weight", "lora_magnitude_vector")], {}, r"DoRA scales the weight"),
        ([DENSE.replace("q_proj", "kv_b_proj")], {}, r"kv_b_proj.* out of answers; evaluate\.adapter=merged"),
    ],
)
def test_adapters_that_vllm_cannot_add_are_refused(names, config, fault, exported):
    with pytest.raises(Fault, match=fault):
        exported(*names, **config)


def test_an_export_without_adapter_is_refused(exported, tmp_path):
    exported(DENSE)
    (tmp_path / "export/adapter/adapter_model.safetensors").unlink()
    with pytest.raises(Fault, match=r"^paths\.export: .*no adapter_model\.safetensors; .*export\.formats=\[adapter\]"):
        unmerged.find(asked(tmp_path))
