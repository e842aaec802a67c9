"""The fused projection of a gated delta net, or of a Mamba layer, is stored in sections, and read as one weight."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.weights import torch_dist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAME = "decoder.layers.0.self_attention.in_proj.weight"
NETS = {"query": 6, "key": 6, "value": 20, "z": 20, "beta": 4, "alpha": 4}, {"z": 20, "x": 20, "B": 8, "C": 8, "dt": 4}
WHOLE = torch.arange(60 * 7.0).view(60, 7)


@pytest.fixture(params=NETS)
def parts(request) -> dict[str, torch.Tensor]:
    return dict(zip(request.param, WHOLE.split([*request.param.values()]), strict=True))


@pytest.fixture
def stored(parts, tmp_path: Path) -> torch_dist.Stored:
    state = {f"{NAME}.{section}": part for section, part in reversed(parts.items())}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return torch_dist.open_checkpoint(tmp_path)


def test_sections_are_one_weight(stored, parts):
    assert [*stored.weights] == [NAME] and stored.places.keys() == {f"{NAME}.{section}" for section in parts}
    assert torch.equal(torch_dist.read(stored, stored.weights[NAME]), WHOLE)
    assert stored.seen == {NAME, *stored.places}


def test_a_section_has_a_name_too(stored, parts):
    assert torch.equal(torch_dist.box(stored, f"{NAME}.z", (1, 0), (5, 7)), parts["z"][1:6])


@pytest.mark.parametrize("first, count", [(0, 60), (5, 1), (5, 2), (11, 25), (59, 1)])
def test_a_box_is_read_from_the_sections_that_it_touches(stored, first, count):
    assert torch.equal(torch_dist.box(stored, NAME, (first, 2), (count, 4)), WHOLE[first : first + count, 2:6])
