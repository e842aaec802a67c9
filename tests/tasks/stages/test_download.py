"""tasks/stages/download.py: what a run finds that another left there."""

from types import SimpleNamespace

from conf.load import load
from tasks.run import launch
from tasks.run.artifact import Work
from tasks.stages import download


def test_a_tiny_model_of_a_run_that_was_killed_behind_it_is_taken(tmp_path, monkeypatch):
    started = []
    (tmp_path / "files").mkdir()

    def makes(arguments, log, say, stopped):
        started.append(arguments)
        (tmp_path / "files/config.json").write_text("{}")

    monkeypatch.setattr(launch, "process", makes)
    run = load("tiny")
    stage_run = SimpleNamespace(
        run=run,
        asked=download.stage(run),
        stopped=lambda work: bool,
        get_or_make=lambda make: make(Work(tmp_path, None, lambda _: None)),  # pyright: ignore[reportArgumentType]
    )
    assert download.download.fn(stage_run) == download.download.fn(stage_run) == {"source": "tiny://glm4-moe"}
    assert len(started) == 1
