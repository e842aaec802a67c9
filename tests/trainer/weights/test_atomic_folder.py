"""trainer/weights/atomic_folder.py: a folder that was whole when its maker was killed is not made again."""

import shutil

import pytest

from contract import checkpoints, output_marks
from contract.output_marks import BASE, JOURNAL
from trainer.weights import atomic_folder

FACTS = {"architecture": "one"}


class Killed(BaseException):
    """Not caught by anything that a process does when it fails."""


def make(place, made="this", content="new"):
    """Returns the units that were finished before."""
    with atomic_folder.write(place, FACTS, BASE, made) as partial:
        found = sorted(path.name for path in (partial / JOURNAL).glob("*.json"))
        (partial / "weights").write_text(content)
        for number in range(5):
            (partial / JOURNAL / f"{number}.json").write_text("{}")
    return found


UNITS = [f"{number}.json" for number in range(5)]


@pytest.mark.parametrize(
    "where, name", [(checkpoints, "mark"), (output_marks, "finished"), (output_marks, "put_in_place")]
)
@pytest.mark.parametrize("there", [False, True])
def test_killed_at_the_very_end_it_has_all_that_was_finished(tmp_path, monkeypatch, where, name, there):
    place = tmp_path / "base"
    if there:
        make(place, content="old")

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(where, name, die)
        make(place)
    assert (place / "weights").exists() == there
    assert make(place) == UNITS
    assert (place / "weights").read_text() == "new" and checkpoints.read_mark(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]
    assert sorted(path.name for path in place.iterdir()) == ["complete.json", "weights"]


def test_killed_behind_the_end_it_leaves_nothing_to_go_on_with(tmp_path, monkeypatch):
    """The old output is in the place of the unfinished one then, and is another folder."""
    place = tmp_path / "base"
    make(place, content="old")

    def exchange_and_die(made, place, kind):
        output_marks._exchange(made, place, kind)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(output_marks, "put_in_place", exchange_and_die)
        make(place)
    assert (place / "weights").read_text() == "new" and (tmp_path / "base.partial/weights").read_text() == "old"
    assert make(place, content="newest") == []
    assert (place / "weights").read_text() == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_killed_while_it_writes_a_file_it_leaves_no_part_of_it_in_the_next_output(tmp_path):
    place = tmp_path / "base"
    with pytest.raises(Killed), atomic_folder.write(place, FACTS, BASE, "this") as partial:
        (partial / ".sums.json.0123abcd.partial").write_text("[")
        raise Killed
    assert make(place) == []
    assert sorted(path.name for path in place.iterdir()) == ["complete.json", "weights"]


def test_another_attempt_takes_nothing_of_it(tmp_path, monkeypatch):
    place = tmp_path / "base"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(output_marks, "put_in_place", lambda *_: (_ for _ in ()).throw(Killed))
        make(place)
    assert make(place, made="that") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_a_folder_of_somebody_elses_that_has_the_journals_name_stays(tmp_path):
    theirs = tmp_path / "base.journal"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    assert make(tmp_path / "base") == []
    assert (theirs / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == ["complete.json", "weights"]
    shutil.rmtree(theirs)
