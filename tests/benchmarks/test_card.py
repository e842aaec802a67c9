"""benchmarks/card.py: a configuration's card has what was measured, and says of all else that it was not."""

import json

import pytest

from benchmarks import card
from benchmarks.study import measured
from tests.benchmarks.study.answers import answer

NAME = "qwen3-30b-a3b-1xh100"


@pytest.fixture
def gpu(monkeypatch):
    """gpu(kind): the kind of this host's GPUs, None for none."""

    def gpu(kind: str | None) -> None:
        monkeypatch.setattr(card.nvidia_smi, "kind", lambda: kind)

    return gpu


def test_without_a_gpu_it_has_the_plan_and_says_that_nothing_was_measured(gpu, tmp_path, capsys):
    gpu(None)
    assert card.main([NAME, "--to", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / f"{NAME}.md").read_text()
    assert "nothing was measured" in text and "| measured on | nothing |" in text and "| ms a step | " in text
    assert all(f"| {name} |" in text for name in card.OF_A_RUN)


def test_what_a_trial_has_said_stands_beside_the_plan(gpu, tmp_path, capsys):
    gpu(None)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer(ranks=2, ms=400.0) | {"layers": 8, "of_layers": 48, "steps": 8}))
    assert card.main([NAME, "--answer", str(file), "--to", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| measured on | 2 x NVIDIA H200 |" in text and "8 of 48 layers" in text
    assert "| ms a step | 400 | 380 | 1.05 |" in text
    assert "| tokens/s/GPU | 81,920 | 86,232 | 0.95 |" in text
    assert "| of a matrix product right after | 50% of 760 | | |" in text


@pytest.mark.parametrize(
    "found, line",
    [({"failed": "no kernel"}, "has failed: no kernel"), ({"ranks": [], "device": ""}, "ran out of memory")],
)
def test_a_trial_that_fails_is_told_and_is_an_exit_code(found, line, gpu, monkeypatch, tmp_path, capsys):
    gpu("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(measured, "measure", lambda *_: found)
    assert card.main([NAME, "--to", str(tmp_path)]) == 1
    assert line in capsys.readouterr().out


def test_a_file_that_is_no_answer_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert card.main([NAME, "--answer", str(tmp_path / "other.json")]) == 2
    assert "--answer: " in capsys.readouterr().err
