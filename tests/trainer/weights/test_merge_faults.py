"""A merged weight that is wrong, or does not lie in the file as it was made, is refused."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.ranks.merge_faults import FAULTS, LAYERS, WIDTH


@pytest.fixture(scope="module")
def told(configure, ranks, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    drawn = torch.Generator().manual_seed(0)
    weights = {f"model.layers.{n}.weight": torch.randn(WIDTH, WIDTH, generator=drawn) for n in range(LAYERS)}
    save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "model/model.safetensors")
    factors = {
        "linear_in": torch.randn(8, WIDTH, generator=drawn),
        "linear_out": torch.randn(WIDTH, 8, generator=drawn),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        save(factors, checkpoint_id=folder / "checkpoint", no_dist=True)
    result = ranks("merge_faults", configure("llama", f"paths.output={folder}"))
    assert result.code == 0, result.output
    return json.loads((folder / "answer.json").read_text())


def test_a_merge_without_a_fault_is_written(told):
    assert told["none"] == "written" and list(told) == FAULTS


def test_what_is_not_in_the_file_as_it_was_written_is_named(told):
    assert "read back, 1 tensors are wrong: model.layers.1.weight" in told["damaged on disk"]
    assert re.search(r"read back, [12] tensors are wrong: model.layers.1.weight", told["cut on disk"])


@pytest.mark.parametrize("fault", ["other product", "written elsewhere"])
def test_what_was_merged_otherwise_is_named(told, fault):
    assert f"read back, {LAYERS} tensors are wrong: model.layers.0.weight" in told[fault]


def test_a_release_that_is_edited_while_it_is_merged_is_named(told):
    assert "1 tensors are not those that the base was converted from: model.layers.1.weight" in told["edited release"]
