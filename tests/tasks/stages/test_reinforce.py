"""tasks/stages/reinforce.py: code of one's own is in the identity of what it has taught."""

import pytest

from conf.load import load
from contract.faults import Fault
from tasks.run.artifact import Stage
from tasks.stages import reinforce

INPUT = Stage("input", 1, {}, {})


def stage(*overrides: str) -> Stage:
    return reinforce.stage(load("tiny-rl", list(overrides)), INPUT, INPUT, INPUT)


@pytest.mark.parametrize(
    ("key", "others"), [("function", ["reinforce.reward=function"]), ("environment", ["reinforce.turns=2"])]
)
def test_the_content_of_a_file_counts_and_its_place_does_not(key, others, tmp_path):
    found = []
    for folder, source in ("one", "def f(**_): pass"), ("other", "def f(**_): pass"), ("third", "def f(**_): return 1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.py").write_text(source)
        found.append(stage(f"reinforce.{key}={tmp_path}/{folder}/file.py:f", *others).fingerprint)
    assert found[0] == found[1] != found[2]


def test_what_a_judge_reads_and_is_called_counts_and_where_it_is_does_not(tmp_path):
    def judged(text: str, name: str, place: str) -> str:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "judge.txt").write_text(text)
        said = [
            "reward=judge",
            f"judge=http://{place}:8000/v1",
            f"judge_model={name}",
            f"judge_prompt={folder}/judge.txt",
        ]
        return stage(*(f"reinforce.{one}" for one in said)).fingerprint

    first = judged("{answer}?", "stern", "here")
    assert judged("{answer}?", "stern", "there") == first
    assert len({first, judged("{answer}!", "stern", "here"), judged("{answer}?", "mild", "here")}) == 3


def test_a_file_that_changes_after_the_run_began_is_refused(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def f(**_): pass")
    run = load("tiny-rl", ["reinforce.turns=2", f"reinforce.environment={file}:f"])
    asked = reinforce.stage(run, INPUT, INPUT, INPUT)
    reinforce.require_unchanged(run, asked)
    file.write_text("def f(**_): return 1")
    with pytest.raises(Fault, match=rf"^reinforce.environment: {file}:f: has changed since the run began"):
        reinforce.require_unchanged(run, asked)


def test_one_turn_is_what_it_was_before_there_were_several():
    config = stage().config
    assert not {"turns", "environment"} & config["reinforce"].keys() and "environment" not in config
