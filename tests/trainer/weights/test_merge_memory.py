"""A merge takes the memory of a few weights, however many a model has."""

import json
import warnings

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.ranks.merge_memory import WIDTH


def test_memory_does_not_grow_with_the_number_of_weights(configure, ranks, tmp_path):
    for count in (4, 40):
        model = tmp_path / f"{count}/model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        weight = torch.randn(WIDTH, WIDTH)
        save_file({f"model.layers.{n}.weight": weight + n for n in range(count)}, model / "model.safetensors")
        factors = {"linear_in": torch.ones(8, WIDTH), "linear_out": torch.ones(WIDTH, 8)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is but one process
            save(factors, checkpoint_id=tmp_path / f"{count}/checkpoint", no_dist=True)
    result = ranks("merge_memory", configure("llama", f"paths.output={tmp_path}"))
    assert result.code == 0, result.output
    grown = json.loads((tmp_path / "answer.json").read_text())
    assert grown["40"] < 4 * 4 * WIDTH * WIDTH, "of four weights, where there are forty"
