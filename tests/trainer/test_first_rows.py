"""trainer/first_rows.py: what is said of rows before a configuration is there; in this process, without torch."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from conf.load import load
from contract.faults import Fault
from contract.first_rows import FirstRows
from tests.support import small_model
from trainer import first_rows
from trainer.data.read import choose
from trainer.data.rows import Bad

CHAT = Path(__file__).parents[1] / "assets/chat_templates/glm.jinja"
TEAMS = ("billing", "shipping", "returns", "accounts")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first-rows") / "model"
    small_model.write(folder)
    return folder


@pytest.fixture
def look(tmp_path, model):
    """look(rows or text, **keys of data) -> FirstRows, of rows in a CSV, or of a text in JSON lines"""

    def look(rows: list[dict] | str, tokenizer: Path = model, **data: object) -> FirstRows:
        source = tmp_path / ("rows.jsonl" if isinstance(rows, str) else "rows.csv")
        if isinstance(rows, str):
            source.write_text(rows)
        else:
            with source.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        conf = {
            "name": "x",
            "model": {"source": "here"},
            "data": {"source": str(source), "seq_length": 8, **data},
            "train": {"steps": 1, "global_batch": 1},
            "optimizer": {"lr": 0.1},
            "checkpoint": {"save_every": 1},
            "paths": {"model": str(tokenizer), "logs": str(tmp_path / "logs")},
        }
        (tmp_path / "x.yaml").write_text(json.dumps(conf))
        return first_rows.look(load(tmp_path / "x.yaml"))

    return look


def tickets(count: int = 60) -> list[dict]:
    return [
        {"ref": f"T-{n}", "goes to": TEAMS[n % 4], "what they wrote": f"ticket {n} of somebody"} for n in range(count)
    ]


def test_two_columns_of_text_are_prompt_and_answer_by_their_values(look):
    found = look(tickets())
    assert found.columns == {"input": "what they wrote", "output": "goes to"}
    assert found.guessed == "their values: 4 different ones of 60 in goes to"
    assert (found.rows, found.whole, found.kind, found.template) == (60, True, "pairs", "plain")
    assert len(found.tokens) == len(found.answers) == 60 and max(found.answers) < min(found.tokens)


def test_two_columns_that_say_nothing_are_taken_in_their_order(look):
    found = look([{"a": f"some words {n}", "b": f"other words {n}"} for n in range(30)])
    assert found.columns == {"input": "a", "output": "b"} and "their order" in found.guessed


def test_names_are_known_whatever_their_capitals(look):
    rows = [{"Question": f"what is {n}", "Topic": f"some topic {n}", "Answer": f"it is {n}"} for n in range(30)]
    found = look(rows)
    assert found.columns == {"input": "Question", "output": "Answer"} and found.guessed == "their names"


def test_what_the_caller_says_is_no_guess(look):
    found = look(tickets(), input="goes to", output="what they wrote")
    assert found.columns == {"input": "goes to", "output": "what they wrote"} and not found.guessed


def test_three_columns_of_text_are_nobody_s_guess(look):
    with pytest.raises(Fault, match=r"rows.csv:2: no known columns: the columns are a \(text\), b \(text\), c"):
        look([{"a": f"some words {n}", "b": f"other words {n}", "c": f"more words {n}"} for n in range(30)])


def test_rows_without_an_answer_are_counted(look):
    rows = "".join(json.dumps({"question": f"q {n}", "answer": "" if n == 3 else f"a {n}"}) + "\n" for n in range(30))
    found = look(rows + "{not JSON\n")
    assert (found.bad, found.read, found.rows) == (2, 31, 31)
    assert found.bad_sample.startswith("answer: empty answer")
    assert len(found.places) == 29


def test_rows_of_which_none_can_be_used(look):
    with pytest.raises(Fault, match="none of the first 5 rows can be used: answer: empty answer"):
        look('{"question": "q", "answer": " "}\n' * 5)


def test_places_are_those_by_which_preparation_splits(look):
    found = look(tickets())
    data = load("tiny").data.model_copy(update={"test": 0.2, "validation": 0.3})
    rows = [{"input": row["what they wrote"], "output": row["goes to"]} for row in tickets()]
    split = choose.splits(np.array([choose.key(row) for row in rows], np.uint64), data)
    counted = [sum(start <= place < end for place in found.places) for start, end in ((0, 0.2), (0.2, 0.5), (0.5, 1))]
    assert counted == [(split == number).sum() for number in (2, 1, 0)]


def test_without_a_tokenizer_lengths_are_guesses(look, tmp_path):
    found = look(tickets(), tokenizer=tmp_path / "none")
    assert found.template == "" and 10 < max(found.tokens) < 30


def test_only_a_part_of_a_large_file_is_read(look, monkeypatch):
    monkeypatch.setattr(first_rows, "ROWS", 1_000)
    monkeypatch.setattr("trainer.data.read.formats.CHUNK", 20_000)
    found = look("".join(json.dumps({"question": f"q {n}", "answer": f"a {n}"}) + "\n" for n in range(10_000)))
    assert not found.whole and found.read < 2_000 and found.places == []
    assert found.rows == pytest.approx(10_000, rel=0.1)


def test_a_template_that_ends_an_answer_by_nothing_is_given_a_stop(look, tmp_path, model):
    """GLM's next turn begins with <|user|>, which is no part of the answer before it."""
    folder = tmp_path / "glm"
    small_model.write(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    (folder / "chat_template.jinja").write_text(CHAT.read_text())
    for number, name in enumerate(("<|user|>", "<|assistant|>", "<|system|>"), 40):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokens["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    found = look(tickets(), tokenizer=folder)
    assert (found.template, found.stop) == ("chat", "<|user|>")


def test_it_is_written_and_read_back(look, tmp_path):
    found = look(tickets())
    found.write(tmp_path / "found.json")
    assert FirstRows.read_from(tmp_path / "found.json") == found


def test_ids_numbers_and_dates_are_no_texts():
    rows = [f"T-{n}" for n in range(30)], [str(n) for n in range(30)], [f"2026-01-{n:02}" for n in range(30)]
    assert not any(first_rows._is_text(values) for values in rows)
    assert first_rows._is_text(["billing", "shipping"] * 15)
    assert first_rows._described(Bad("empty", "a")) == "a: empty"
