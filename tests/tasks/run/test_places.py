"""tasks/run/places.py: a variable names a folder though no shell has read it, as in the environment of a job."""

import pytest

from contract import installation
from contract.faults import Fault
from flows import doctor
from tasks.run.places import open_run_store, runs_folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FINETUNE_RUNS", raising=False)
    monkeypatch.delenv("FINETUNE_STORE", raising=False)
    return tmp_path


@pytest.mark.parametrize("named, meant", [("~/runs", "runs"), ("~", ""), ("{home}/a b", "a b")])
def test_the_folder_of_local_files(home, monkeypatch, named, meant):
    monkeypatch.setenv("FINETUNE_RUNS", named.format(home=home))
    assert runs_folder() == doctor.runs_folder() == home / meant
    assert open_run_store().uri == (home / meant / "store").as_uri()
    assert doctor.store().fact == str(home / meant / "store")


def test_an_empty_name_is_none_in_any_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FINETUNE_RUNS", "")
    monkeypatch.chdir(tmp_path)
    assert runs_folder() == doctor.runs_folder() == installation.home() / "runs"


def test_a_home_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setenv("FINETUNE_RUNS", "~nobody-here/runs")
    with pytest.raises(Fault, match=r"^FINETUNE_RUNS: ~nobody-here/runs: no such home folder; write the full path$"):
        runs_folder()
    monkeypatch.setenv("FINETUNE_STORE", "~nobody-here/store")
    with pytest.raises(Fault, match=r"^store: ~nobody-here/store: no such home folder; write the full path$"):
        open_run_store()
