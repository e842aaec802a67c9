"""conf/schema/row_files.py: what lies in a folder of rows and cannot be read is told of, and never left out."""

import os

import pytest

from conf.schema import row_files
from contract import indexed_files
from contract.faults import Fault
from tasks.sources import row_sources


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jsonl", "b/c.csv", ".git/x.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def closed(monkeypatch, path) -> None:
    """Have a folder that only somebody else may look into; root may look into all."""
    scandir = os.scandir

    def refusing(place):
        if os.fspath(place) == str(path):
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)


def test_a_folder_of_rows(folder):
    (folder / "linked.jsonl").symlink_to(folder / "a.jsonl")
    (folder / "LICENSE").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.jsonl")
    assert [file.name for file in row_files.inside(folder)] == ["a.jsonl", "c.csv", "linked.jsonl"]


def test_rows_behind_a_link_that_leads_nowhere_are_not_left_out(folder):
    (folder / "b/d.jsonl").symlink_to("blobs/5f3a")
    with pytest.raises(Fault, match=rf"^{folder}/b/d.jsonl: a link to blobs/5f3a, which does not exist$"):
        row_files.inside(folder)


def test_a_folder_that_cannot_be_looked_into_is_not_left_out(folder, monkeypatch):
    closed(monkeypatch, folder / "b")
    said = rf"{folder}/b: Permission denied; its content cannot be listed$"
    for look in (row_files.inside, indexed_files.of):
        with pytest.raises(Fault, match=f"^{said}"):
            look(folder)
    with pytest.raises(Fault, match=f"^data.source: {said}"):
        row_sources.files(str(folder), "data.source")


def test_a_hidden_folder_may_be_closed(folder, monkeypatch):
    closed(monkeypatch, folder / ".git")
    assert [file.name for file in row_files.inside(folder)] == ["a.jsonl", "c.csv"]
