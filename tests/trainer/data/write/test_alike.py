"""trainer/data/write/alike.py: copies, near copies and leaks, where they lie, and what is left of them."""

import json

import numpy as np
import pytest

from conf.schema.data import Data
from trainer.data.read import likeness
from trainer.data.write import alike, spool

TRAINING, VALIDATION, TEST = 0, 1, 2
# Of each row: its text, its prompt, its split. The first four are one text, the fourth with a word changed.
ROWS = [
    ("a", "a", TRAINING),
    ("a", "a", TRAINING),
    ("b", "b", TEST),
    ("a'", "a'", TRAINING),
    ("c", "b", TRAINING),  # has the prompt of the test's row
    ("d", "d", VALIDATION),
    ("d'", "d'", TRAINING),
    ("d''", "d''", TEST),
    ("e", "e", TRAINING),
]


@pytest.fixture
def rows(tmp_path):
    """A spool of two chunks, and the number of each of its rows."""
    texts = sorted({text[0] for text, *_ in ROWS})
    drawn = {text: np.random.Generator(np.random.PCG64(n)).integers(0, 9999, 400) for n, text in enumerate(texts)}
    paths = []
    for number, some in enumerate((ROWS[:5], ROWS[5:])):
        tokens = [drawn[text[0]].copy() for text, *_ in some]
        for (text, *_), ids in zip(some, tokens, strict=True):
            ids[200 : 200 + len(text) - 1] += 1
        lengths = np.full(len(some), 400, np.int32)
        signature = likeness.signatures(np.concatenate(tokens).astype(np.int32), lengths)
        arrays = {
            "length": lengths,
            "key": np.array([_key(text) for text, *_ in some], np.uint64),
            "asked": np.array([_key(prompt) for _, prompt, _ in some], np.uint64),
            "signature": signature.ravel(),
            "number": np.arange(1, len(some) + 1),
            "file": np.zeros(len(some), np.int16),
        } | {f"band{n}": band for n, band in enumerate(likeness.bands(signature))}
        paths.append(tmp_path / f"{number}.chunk")
        spool.write(paths[-1], arrays, {"places": [f"file-{number}.jsonl:"]})
    return spool.Spool(paths), np.arange(len(ROWS), dtype=np.int32)


def _key(text: str) -> int:
    return int.from_bytes(text.encode())


def found(rows) -> alike.Alike:
    return alike.find(*rows, np.array([split for *_, split in ROWS], np.int8))


def left(rows, **keys: str) -> list[int]:
    return np.flatnonzero(~alike.dropped(found(rows), Data(seq_length=8, **keys))).tolist()


def test_each_is_listed_with_the_place_of_both(rows, tmp_path):
    told = alike.write(tmp_path, found(rows), np.zeros(len(ROWS), bool), *rows)["alike"]
    lines = [json.loads(line) for line in (tmp_path / told["file"]).read_text().splitlines()]
    assert [(line["kind"], line["row"], line["like"], line["by"]) for line in lines] == [
        ("copy", "file-0.jsonl:2", "file-0.jsonl:1", "copy"),
        ("leak", "file-0.jsonl:3", "file-0.jsonl:5", "prompt"),
        ("near copy", "file-0.jsonl:4", "file-0.jsonl:1", "near copy"),
        ("leak", "file-1.jsonl:2", "file-1.jsonl:1", "near copy"),
        ("leak", "file-1.jsonl:3", "file-1.jsonl:1", "near copy"),
    ]
    assert told["counts"] == {"leak": 3, "copy": 1, "near copy": 1}
    assert told["samples"]["copy"] == lines[:1]


def test_what_is_dropped_is_what_its_key_says(rows):
    assert left(rows) == [*range(9)]
    assert left(rows, duplicates="drop") == [0, 2, 3, 4, 5, 6, 7, 8]
    assert left(rows, near_copies="drop") == [0, 1, 2, 4, 5, 6, 7, 8]
    assert left(rows, leaks="drop") == [0, 1, 2, 3, 7, 8]  # training's rows, and of validation what the test has


def test_nothing_is_left_to_report_once_all_is_dropped(rows):
    before = alike.counts(found(rows), rows[1])
    assert before["duplicates"] == {"exact": 1, "near": 3, "samples": [[3, 0], [6, 5], [7, 5]]}
    assert before["overlap"] == {"exact": 1, "near": 2}
    gone = alike.dropped(found(rows), Data(seq_length=8, duplicates="drop", near_copies="drop", leaks="drop"))
    after = alike.counts(found(rows).only(~gone), rows[1][~gone])
    assert after == {"duplicates": {"exact": 0, "near": 0, "samples": []}, "overlap": {"exact": 0, "near": 0}}


def test_a_long_list_is_cut_in_the_report_alone(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(alike, "SHOWN", 1)
    told = alike.write(tmp_path, found(rows), np.ones(len(ROWS), bool), *rows)["alike"]
    assert [len(some) for some in told["samples"].values()] == [1, 1, 1]
    lines = (tmp_path / alike.FILE).read_text().splitlines()
    assert len(lines) == 5 and json.loads(lines[0])["dropped"] == ["file-0.jsonl:2", "file-0.jsonl:1"]


def test_rows_that_are_like_none_leave_no_file(rows, tmp_path):
    mine, kept = rows
    some = kept[[0, 2, 8]]
    one = alike.find(mine, some, np.zeros(3, np.int8))
    assert alike.write(tmp_path, one, np.zeros(3, bool), mine, some) == {}
    assert not (tmp_path / alike.FILE).exists()
