"""tasks/stages/download.py: what a run finds that another left there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conf.load import load
from tasks.run import launch
from tasks.run.artifact import Work
from tasks.stages import download


def run_of(name: str, folder: Path) -> Any:
    run = load(name)
    return SimpleNamespace(
        run=run,
        asked=download.stage(run),
        stopped=lambda work: bool,
        get_or_make=lambda make: make(Work(folder, None, lambda _: None)),  # pyright: ignore[reportArgumentType]
    )


def test_a_tiny_model_of_a_run_that_was_killed_behind_it_is_taken(tmp_path, monkeypatch):
    started = []
    (tmp_path / "files").mkdir()

    def makes(arguments, log, say, stopped, changed):
        started.append(arguments)
        (tmp_path / "files/config.json").write_text("{}")

    monkeypatch.setattr(launch, "process", makes)
    stage_run = run_of("tiny", tmp_path)
    assert download.download.fn(stage_run) == download.download.fn(stage_run) == {"source": "tiny://glm4-moe"}
    assert len(started) == 1


def test_drawn_weights_of_a_run_that_was_killed_behind_them_are_taken(tmp_path, monkeypatch):
    started = []

    def makes(arguments, log, say, stopped, changed):
        folder = {"trainer.tiny": tmp_path / "tokenizer", "trainer.weights.drawn": tmp_path / "files"}[arguments[0]]
        folder.mkdir()  # both programs refuse a folder that is not empty
        (folder / "config.json").write_text("{}")
        started.append(arguments[0])

    monkeypatch.setattr(launch, "process", makes)
    stage_run = run_of("tiny-pretrain", tmp_path)
    assert download.download.fn(stage_run) == download.download.fn(stage_run)
    assert started == ["trainer.tiny", "trainer.weights.drawn"]
