"""tasks/sources/training_rows.py: how many sequences a plan assumes before any are prepared."""

import json

import pytest

from conf.load import load
from tasks.sources import training_rows


def estimate(*overrides: str, made: dict | None = None) -> tuple[int | None, str]:
    return training_rows.sequences(load("tiny", [*overrides]), made)


def test_what_is_prepared_is_exact():
    made = {"kind": "sft", "sequences": {"training": 1483}, "tokens_training": 9}
    assert estimate(made=made) == (1483, "1,483 sequences, as prepared")
    assert estimate(made=made | {"kind": "text", "tokens_training": 6400})[0] == 100


def test_lines_of_local_files_are_counted_and_scaled(tmp_path, monkeypatch):
    monkeypatch.setattr(training_rows, "SAMPLE", 1000)
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).write_text('{"input": "what", "output": "this"}\n' * 1000)
    source = f"data.source={tmp_path}"
    count, words = estimate(source)
    assert count == pytest.approx(2000 * 0.92, rel=0.04)
    assert words.startswith("about 1,") and words.endswith("00 training rows, by the size of the files")
    assert estimate(source, "data.rows=100")[0] == 92
    packed, words = estimate(source, "data.packed=true", "train.micro_batch=1")
    assert packed == pytest.approx(72_000 * 0.92 / 4 / 64, rel=0.02) and "sequences of about" in words


@pytest.mark.parametrize("source", ["org/rows", "s3://bucket/rows", "nothing.jsonl"])
def test_what_cannot_be_counted_from_here_is_unknown(source):
    assert estimate(f"data.source={source}") == (None, "that are counted once the data are prepared")


def test_a_file_that_is_compressed_or_of_columns_is_unknown(tmp_path):
    for name in ("rows.jsonl.gz", "rows.parquet", "rows.json"):
        (tmp_path / name).write_text(json.dumps([{"input": "a"}]))
        assert estimate(f"data.source={tmp_path / name}")[0] is None


def test_an_empty_file_gives_the_least(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    assert estimate(f"data.source={tmp_path / 'rows.jsonl'}")[0] == 1
