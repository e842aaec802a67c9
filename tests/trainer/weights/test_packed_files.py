"""A base that was packed once is read as it was written, or a line names the tensor that is not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from conf.model_files import safetensors_header
from conf.rules.packed_base import FORMATS
from contract.faults import Fault
from trainer.weights.packed_base import files
from trainer.weights.packed_base.part import Part

FILE = "00000.safetensors"
EMBEDDING, MATRIX = "embedding.weight", "decoder.layers.0.linear_fc1.weight"
WHOLE = Part(0, MATRIX, (0, 0), (4, 64), (0, 1))
HALF = Part(0, MATRIX, (0, 0), (2, 64), (0, 1))  # a rank's, the damage lies in the other


def write(base) -> None:
    folder = base / files.FOLDER
    folder.mkdir()
    content = {
        EMBEDDING: torch.arange(12.0).view(6, 2),
        MATRIX + files.CODES: torch.arange(4 * 32, dtype=torch.uint8).view(4, 32),
        MATRIX + files.SCALES: torch.ones(1, 4, 4).to(torch.float8_e4m3fn),
        MATRIX + files.FACTORS: torch.ones(1),
    }
    save_file(content, folder / FILE)
    rows = {EMBEDDING: {"file": FILE}, MATRIX: {"file": FILE, "height": 1, "matrices": 1}}
    files.write_index(folder, {name: files.with_sums(row, content, name) for name, row in rows.items()})


def read(base) -> None:
    found = files.open_packed(base, FORMATS["nvfp4"])
    found.box(EMBEDDING, (0, 0), (6, 2))
    found.of_part(HALF, (1, 16))


def flip(base, name: str, byte: int = -1) -> None:
    path = base / files.FOLDER / FILE
    place, content = safetensors_header.read(path)[name], bytearray(path.read_bytes())
    content[place.start + byte % place.size] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_read(tmp_path):
    write(tmp_path)
    read(tmp_path)
    found = files.open_packed(tmp_path, FORMATS["nvfp4"])
    assert found.box(EMBEDDING, (2, 0), (2, 2)).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    codes, scales, factor = found.of_part(WHOLE, (1, 16))
    assert codes.flatten().tolist() == [*range(128)] and scales.shape == (4, 4) and factor == 1


@pytest.mark.parametrize("tensor", [EMBEDDING, MATRIX + files.CODES, MATRIX + files.SCALES, MATRIX + files.FACTORS])
def test_a_byte_that_has_changed_is_named_by_its_tensor(tensor, tmp_path):
    write(tmp_path)
    flip(tmp_path, tensor)
    with pytest.raises(
        Fault, match=rf"{FILE}: damaged: {tensor} is not as it was written; remove the base and convert"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    "was, now", [(b'"U8"', b'"I8"'), (b"[4,32]", b"[8,16]"), (b'"F8_E4M3"', b'"F8_E5M2"'), (b"{", b"[")]
)
def test_a_header_that_has_changed_is_refused(was, now, tmp_path):
    write(tmp_path)
    path = tmp_path / files.FOLDER / FILE
    assert was in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(was, now, 1))
    with pytest.raises(Fault, match=rf"{FILE}: .*; remove the base and convert again"):
        read(tmp_path)


@pytest.mark.parametrize("key, value", [("height", 2), ("matrices", 2), ("file", 3), ("sums", [])])
def test_an_index_that_has_changed_is_refused(key, value, tmp_path):
    write(tmp_path)
    path = tmp_path / files.FOLDER / files.INDEX
    index = json.loads(path.read_text())
    index[MATRIX][key] = value
    path.write_text(json.dumps(index))
    with pytest.raises(Fault, match=rf"{files.INDEX}: |{FILE}: damaged"):
        read(tmp_path)


def test_a_base_of_before_has_no_checksums_and_is_read(tmp_path):
    write(tmp_path)
    path = tmp_path / files.FOLDER / files.INDEX
    index = json.loads(path.read_text())
    for row in index.values():
        del row["sums"]
    path.write_text(json.dumps(index))
    flip(tmp_path, EMBEDDING)
    read(tmp_path)


def test_a_tensor_is_looked_at_once(tmp_path, monkeypatch):
    write(tmp_path)
    found, asked = files.open_packed(tmp_path, FORMATS["nvfp4"]), []
    monkeypatch.setattr(
        files, "_checksum", lambda tensor, row, taken=files._checksum: asked.append(1) or taken(tensor, row)
    )
    for _ in range(3):
        found.of_part(WHOLE, (1, 16))
    assert len(asked) == 3  # codes, scales and factors


def test_who_compares_all_of_it_asks_for_no_checksum(tmp_path):
    write(tmp_path)
    flip(tmp_path, MATRIX + files.CODES)
    files.open_packed(tmp_path, FORMATS["nvfp4"], checked=False).of_part(WHOLE, (1, 16))
