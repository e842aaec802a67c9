"""Megatron's .bin/.idx as data: what core's own builder wrote is trained on as it is, and what is wrong is named."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from conf.load import load
from conf.schema.run import Run
from contract.faults import Fault
from tests.support import small_model
from trainer.data import blend, indexed, preparation, prepared

END = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("blend") / "model"
    small_model.write(folder)
    return folder


@pytest.fixture
def overridden(model, tmp_path):
    """Overrides of tiny for a run in this folder, with others in their place."""

    def overridden(*overrides: str) -> list[str]:
        own = {"paths.model": model, "paths.data": tmp_path / "data", "paths.output": tmp_path / "output"}
        own |= {"data.template": "auto", "data.validation": 0.2, "data.test": 0.1, "data.seq_length": 16}
        own |= dict(override.split("=", 1) for override in overrides)
        return [f"{key}={value}" for key, value in own.items()]

    return overridden


@pytest.fixture
def configure(overridden):
    return lambda *overrides: load("tiny", overridden(*overrides))


def write(prefix: Path, count: int = 40, seed: int = 0, most: int = 48) -> Path:
    """Documents of random ids, each with the end of text behind it."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 30, count).astype(np.int32)
    ids = draw.integers(1, most, lengths.sum()).astype(np.int32)
    ids[np.cumsum(lengths) - 1] = END
    prefix.parent.mkdir(parents=True, exist_ok=True)
    indexed.write(prefix, [(ids, lengths)], 512)
    return prefix


def prepare(run: Run) -> dict:
    preparation.prepare(run, run.data.parts, [None] * len(run.data.parts), Path(run.paths.data))
    return json.loads((Path(run.paths.data) / "report.json").read_text())


def refused(run: Run) -> str:
    with pytest.raises(Fault) as raised:
        prepare(run)
    assert "\n" not in str(raised.value) and not Path(run.paths.data).exists()
    return str(raised.value)


@pytest.mark.parametrize("named", ["a", "a.bin", "a.idx", "", "a.*"])
def test_a_prefix_a_file_a_folder_or_a_pattern_names_them_and_tokens_stay_as_they_are(named, configure, tmp_path):
    prefix = write(tmp_path / "corpus/a")
    cache = prefix / "cache/GPTDataset_indices"  # core's own, where nobody names another place
    cache.mkdir(parents=True)
    (cache / "1-GPTDataset-train-description.txt").write_text("{}")
    run = configure(f"data.source={tmp_path}/corpus/{named}")
    report = prepare(run)
    for ending in ("bin", "idx"):
        placed = tmp_path / f"data/0-a.{ending}"
        assert placed.samefile(f"{prefix}.{ending}"), "no byte is written a second time"
    splits = ("training", "validation", "test")
    assert [report["rows"][name] for name in splits] == [28, 8, 4]
    assert sum(report["tokens"][name]["tokens"] for name in splits) * 2 == Path(f"{prefix}.bin").stat().st_size
    found = prepared.check(run)
    assert (found.kind, found.sequences["training"]) == ("text", 28)
    assert prepared.of_an_epoch(run, found) == report["tokens"]["training"]["tokens"] // 16
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(Fault, match=r"changed since it was prepared"):
        prepared.check(run)


def test_several_share_a_weight_by_their_tokens(configure, tmp_path):
    for seed, (name, count) in enumerate({"c/a": 100, "c/b": 300, "d": 50}.items()):
        write(tmp_path / name, count, seed)
    mixture = f"data.mixture=[{{source: {tmp_path}/c, weight: 3}}, {{source: {tmp_path}/d}}]"
    report = prepare(configure("data.source=null", mixture))
    found = json.loads((tmp_path / "data" / blend.FILE).read_text())
    assert [one["prefix"] for one in found["data_sets"]] == ["0-a", "1-b", "2-d"]
    a, b, d = (one["weight"] for one in found["data_sets"])
    sizes = [Path(f"{tmp_path}/{name}.bin").stat().st_size for name in ("c/a", "c/b")]
    assert (a + b, d) == (pytest.approx(3), 1) and a / b == pytest.approx(sizes[0] / sizes[1])
    assert [source["rows"] for source in report["sources"]] == [400, 50]
    assert found["split"] == "0.7000000000,0.2000000000,0.1000000000"


def test_samples_and_their_order_are_those_of_megatron_core(overridden, tmp_path, as_bridge):
    def places(name: str) -> list[str]:
        return [f"paths.data={tmp_path}/{name}/data", f"paths.output={tmp_path}/{name}/output"]

    draw = np.random.default_rng(3)
    documents = {
        name: [[*draw.integers(1, 48, draw.integers(1, 40)).tolist(), END] for _ in range(count)]
        for name, count in (("a", 90), ("b", 40), ("c", 60))
    }
    one = {"blend": [["a"], None], "split": "0.7,0.2,0.1", "sizes": [200, 50, 0]}
    one["overrides"] = overridden(*places("one"), f"data.source={tmp_path}/a")
    several = {"blend": [[*"abc"], [0.2, 0.5, 3.0]], "split": "80,20,0", "sizes": [200, 50, 0]}
    mixture = _mixture(tmp_path, a=0.2, b=0.5, c=3)
    several["overrides"] = overridden(*places("several"), "data.source=null", "data.seed=7", "data.test=0", mixture)
    for core, found in as_bridge(tmp_path, "blends", documents=documents, cases=[one, several]):
        assert found == core and [len(samples) for samples in found] == [200, 50]


def _mixture(folder: Path, **weights: float) -> str:
    parts = (f"{{source: {folder}/{name}, weight: {weight}}}" for name, weight in weights.items())
    return f"data.mixture=[{', '.join(parts)}]"


def cut(prefix: Path) -> None:
    file = Path(f"{prefix}.bin")
    file.write_bytes(file.read_bytes()[:-2])


def empty(prefix: Path) -> None:
    indexed.write(prefix, [], 512)


def other_header(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_bytes(b"x" * 200)


def short_header(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX")


def cut_index(prefix: Path) -> None:
    file = Path(f"{prefix}.idx")
    file.write_bytes(file.read_bytes()[:-40])


def other_index(prefix: Path) -> None:
    other = write(prefix.with_name("other"), seed=9)
    Path(f"{other}.idx").replace(f"{prefix}.idx")


def of_floats(prefix: Path) -> None:
    _replace(Path(f"{prefix}.idx"), 17, struct.pack("<B", 6))


def other_pointers(prefix: Path) -> None:
    _replace(Path(f"{prefix}.idx"), 34 + 4 * 40 + 8, struct.pack("<q", 1))


def no_bin(prefix: Path) -> None:
    Path(f"{prefix}.bin").unlink()


def large_ids(prefix: Path) -> None:
    write(prefix, most=60)


def _replace(file: Path, at: int, value: bytes) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:at] + value + content[at + len(value) :])


@pytest.mark.parametrize(
    "damage, said",
    [
        (cut, r"a\.bin: \d+ bytes, but its index says \d+ tokens of 2 bytes, \d+; it is truncated"),
        (empty, r"a\.bin: empty: its index has 0 sequences"),
        (other_header, r"a\.idx: begins with b'xxxxxxxx'; Megatron's index begins with b'MMIDIDX'"),
        (short_header, r"a\.idx: 7 bytes; the header alone"),
        (cut_index, r"a\.idx: \d+ bytes, but an index of 40 sequences has \d+; copy it again"),
        (other_index, r"a\.bin: \d+ bytes, but its index says"),
        (of_floats, r"a\.idx: tokens of type 6; supported: version 1 and integers"),
        (other_pointers, r"a\.idx: its sequences are not contiguous"),
        (no_bin, r"a\.idx: cannot be used without a\.bin"),
        (large_ids, r"a\.bin: token \d+ is [45]\d, but the model's vocabulary has 48; it is from another"),
    ],
)
def test_what_is_wrong_with_them_is_one_line(damage, said, configure, tmp_path):
    damage(write(tmp_path / "a"))
    with pytest.raises(Fault, match=said):
        prepare(configure(f"data.source={tmp_path}/a"))


def test_keys_of_rows_and_rows_beside_them_are_refused(configure, tmp_path):
    write(tmp_path / "a")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    source = f"data.source={tmp_path}/a"
    assert refused(configure(source, "data.rows=3")).startswith("data.rows: is for rows; ")
    assert refused(configure(source, "data.shape=pairs")).startswith("data.shape: pairs: ")
    mixture = f"data.mixture=[{{source: {tmp_path}/a}}, {{source: {tmp_path}/rows.jsonl}}]"
    assert "cannot be mixed with rows" in refused(configure("data.source=null", mixture))
    few = write(tmp_path / "few/b", 2)
    assert refused(configure(f"data.source={few}")).startswith(f"data.test: gets no tokens of {few}, which")


def test_a_data_set_of_another_tokenizer_is_worth_a_look(configure, tmp_path):
    prefix = tmp_path / "a"
    indexed.write(prefix, [(np.arange(100, dtype=np.int32) % 40 + 1, np.full(20, 5, np.int32))], 512)
    assert prepare(configure(f"data.source={prefix}"))["warnings"] == [
        f"a: 20 of 20 documents do not end in the tokenizer's end of text, {END}: was this tokenizer used?"
    ]
