"""Numbers of a file are the same wherever they begin, and writing into them changes no file."""

import numpy as np
import pytest
import torch

from trainer.weights.mapped import mapped_numbers


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(np.random.default_rng(1).bytes(20000))
    with path.open("rb") as f:
        yield f


@pytest.mark.parametrize("start", [0, 2, 3, 4096, 4099, 9001])
def test_numbers_are_those_of_the_file(file, start):
    content = file.read()
    found = mapped_numbers.read(file, start, torch.bfloat16, 1000)
    assert found.view(torch.uint8).numpy().tobytes() == content[start : start + 2000]
    found.zero_()
    file.seek(0)
    assert file.read() == content


@pytest.mark.parametrize("start", [19000, 19001])
def test_a_file_that_ends_early_is_told(file, start):
    with pytest.raises(ValueError, match=r"ends|greater than"):
        mapped_numbers.read(file, start, torch.float32, 1000)
