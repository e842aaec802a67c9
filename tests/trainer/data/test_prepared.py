"""What training refuses: prepared data that were changed, were made otherwise than the run says, or do not suffice."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.data import prepared
from trainer.data.tokens import tokenizer
from trainer.rehearsal import tiny_models

SETTINGS = ("seq_length", "packed", "template", "loss_on", "stop", "seed")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "model"
    tiny_models.make_model("llama", folder)
    return folder


@pytest.fixture
def configure(model, tmp_path):
    def configure(*overrides: str):
        own = {"paths.model": model, "paths.data": tmp_path / "data", "paths.output": tmp_path / "output"}
        own |= {"train.validate_every": 0} | dict(override.split("=", 1) for override in overrides)
        return load("tiny", [f"{key}={value}" for key, value in own.items()])

    return configure


@pytest.fixture
def place(configure, tmp_path) -> Path:
    """Prepared data as trainer.prepare leaves them, with any bytes in the files."""
    folder, source = tmp_path / "data", tmp_path / "source.jsonl"
    folder.mkdir()
    source.write_text("rows")
    for name in ("training.jsonl", "training.idx.parquet", "report.json"):
        (folder / name).write_text(f"stands for {name}")
    run = configure()
    facts = {
        "kind": "sft",
        "files": {path.name: facts_of(path) for path in folder.iterdir()},
        "settings": {key: run.data.model_dump(mode="json")[key] for key in SETTINGS},
        "sources": [{"source": str(source), "files": [{"path": str(source), **facts_of(source)}]}, {"source": "a/b"}],
        "tokenizer": tokenizer.digest(Path(run.paths.model)),
        "rows": {"training": 100, "validation": 20, "test": 0},
        "sequences": {"training": 100, "validation": 20, "test": 0},
        "vocab_size": 500,
        "pad_id": 0,
    }
    (folder / "prepared.json").write_text(json.dumps(facts))
    return folder


def facts_of(path: Path) -> dict:
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def change(place: Path, key: str, **values) -> None:
    path = place / "prepared.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {key: facts[key] | values}))


def refused(run) -> str:
    with pytest.raises(Fault) as fault:
        prepared.check(run)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_accepts_what_is_whole(place, configure):
    assert prepared.check(configure()).sequences["training"] == 100
    assert prepared.folder(configure()) == place


def test_one_changed_byte(place, configure):
    path = place / "training.idx.parquet"
    path.write_text(path.read_text().replace("s", "S", 1))
    assert refused(configure()) == f"{path}: changed since it was prepared; python -m trainer.prepare writes it again"


def test_a_file_that_is_cut_or_gone(place, configure):
    path = place / "training.jsonl"
    path.write_text("stands")
    assert refused(configure()).startswith(f"{path}: changed from 25 to 6 bytes since it was prepared")
    path.unlink()
    assert refused(configure()).startswith(f"{path}: gone since it was prepared")


def test_an_edited_source(place, configure, tmp_path):
    source = tmp_path / "source.jsonl"
    source.write_text("Rows")
    assert refused(configure()).startswith(f"{source}: was edited after its preparation")
    source.unlink()
    prepared.check(configure())  # data that travelled to another host


def test_a_rank_leaves_reading_to_the_process_that_started_it(place, configure, monkeypatch):
    path = place / "training.jsonl"
    path.write_text(path.read_text().upper())
    monkeypatch.setenv("LOCAL_RANK", "1")
    prepared.check(configure())
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "changed" in refused(configure())
    monkeypatch.setenv("TRAINER_FAULT_FILE", "fault")
    prepared.check(configure())


@pytest.mark.parametrize(
    "override, text",
    [
        ("data.seq_length=128", "data.seq_length: 128, but PLACE was prepared with 64; "),
        ("data.packed=true", "data.packed: true, but PLACE was prepared with false; "),
        ('data.template="{input}{output}"', 'data.template: "{input}{output}", but PLACE was prepared with "{input} '),
        ("data.loss_on=all", 'data.loss_on: "all", but PLACE was prepared with "assistant"; '),
        ("data.stop=END", 'data.stop: "END", but PLACE was prepared with null; '),
    ],
)
def test_other_settings(override, text, place, configure):
    extra = ["train.micro_batch=1"] if "packed" in override else []
    assert refused(configure(override, *extra)).startswith(text.replace("PLACE", str(place)))


def test_settings_that_change_no_token(place, configure):
    prepared.check(configure("data.seed=7", "data.workers=2", "data.processes=3", "data.source=elsewhere"))


def test_packed_rows_must_divide_over_the_layout(place, configure):
    packed = ["data.packed=true", "train.micro_batch=1"]
    change(place, "settings", packed=True, multiple=16)
    prepared.check(configure(*packed))
    assert "data.seed: 7" in refused(configure(*packed, "data.seed=7"))
    wide = [*packed, "layout.cp=2", "layout.tp=2", "layout.sp=true", "layout.gpus_per_node=4"]
    prepared.check(configure(*wide))
    change(place, "settings", multiple=4)
    expected = "layout: cp 2, tp 2 and sp true need packed rows whose length is a multiple of 16, but .* of 4; "
    assert re.match(expected, refused(configure(*wide)))
    change(place, "settings", multiple=48)
    prepared.check(configure(*wide))


def test_another_tokenizer(place, configure, tmp_path):
    tiny_models.make_model("llama", tmp_path / "other", seed=1)
    path = tmp_path / "other" / "tokenizer.json"
    prepared.check(configure(f"paths.model={tmp_path / 'other'}"))  # other weights, the same tokens
    path.write_text(path.read_text().replace("Ġ", "G"))
    found = refused(configure(f"paths.model={tmp_path / 'other'}"))
    assert found.startswith(f"paths.model: {tmp_path / 'other'}: not the tokenizer that {place} was")


def test_too_few_sequences(place, configure):
    change(place, "sequences", training=15)
    assert refused(configure()) == (
        f"train.global_batch: 16, but {place} contains 15 sequences for training; "
        "use a train.global_batch of at most 15 or more rows"
    )
    change(place, "settings", packed=True, multiple=16)
    assert "packed from 100 rows; use" in refused(configure("data.packed=true", "train.micro_batch=1"))
    assert refused(configure("data.packed=true", "train.micro_batch=1")).endswith("or data.packed: false")


def test_too_little_to_validate_with(place, configure):
    change(place, "sequences", validation=15)
    prepared.check(configure())
    assert refused(configure("train.validate_every=5")).startswith(
        f"train.validate_every: 5, but {place} contains 15 sequences for validation, fewer than one batch of 16; "
    )


def test_texts_are_repeated_until_there_are_enough(place, configure):
    facts = json.loads((place / "prepared.json").read_text()) | {"kind": "text"}
    facts["sequences"] = {"training": 1, "validation": 0, "test": 0}
    (place / "prepared.json").write_text(json.dumps(facts))
    prepared.check(configure())
    assert "contains 0 sequences for validation" in refused(configure("train.validate_every=5"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": '])
def test_a_manifest_that_is_none(text, place, configure):
    (place / "prepared.json").write_text(text)
    assert refused(configure()).startswith(f"{place / 'prepared.json'}: not a file of trainer.prepare")


def test_nothing_there(configure, tmp_path):
    run = configure()
    assert prepared.folder(run) == tmp_path / "output" / "data"
    with pytest.raises(Fault, match=f"^paths.data: {tmp_path / 'data'}: neither prepared.json .* nor training.jsonl"):
        prepared.make(run)
    assert refused(run) == (
        f"paths.data: {tmp_path / 'output' / 'data'}: no prepared.json; python -m trainer.prepare writes it"
    )
