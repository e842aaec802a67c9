"""flows/artifacts.py: boards and logs of gangs are counted, and go with their training or when they are old."""

import json
import time

import pytest

from flows import artifacts
from tasks.gang.history import timeline
from tasks.gang.history.timeline import Attempt, History
from tasks.run import artifact, lease
from tasks.run.artifact import Stage
from tasks.store import open_store

DAY = 86400


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def gang(store, tmp_path):
    """gang(rate, complete, days, run) -> name of a gang whose training ended so many days ago, and a run's note."""

    def gang(rate: float, complete: bool = True, days: float = 0, run: float | None = None) -> str:
        stage = Stage("train", 1, {"lr": rate})
        at = time.time() - days * DAY

        def fill(work):
            (work.folder / "files/content").write_text("trained")
            return {}

        if complete:
            artifact.get_or_make(stage, store, fill, tmp_path / "work", lambda _: None, {"flow": "toy"})
            record = json.loads(store.read(f"{stage.key}/artifact.json")[0])
            record["made"]["at"] = at
            store.write(f"{stage.key}/artifact.json", json.dumps(record).encode())
        if run is not None:
            note = {"artifacts": [stage.key], "started": time.time() - run * DAY}
            store.write(f"runs/{stage.fingerprint}.json", json.dumps(note).encode())
        name = f"train-{stage.fingerprint}"
        store.write(f"gangs/{name}/1/gang.json", b"{}")
        store.write(f"gangs/{name}/1/logs/0/rank00000.out.00000", b"x" * 1000)
        timeline.write(store, History(name, "tiny", "tiny-1", (Attempt(1, at),), "done"))
        return name

    return gang


def left(store) -> set[str]:
    return {name.split("/")[0] for name in store.keys("gangs")} - {"history"}


def test_list_counts_them(store, gang, capsys):
    for rate in (0.1, 0.2):
        gang(rate)
    assert artifacts.main(["list"]) == 0
    *_, said, gangs = capsys.readouterr().out.splitlines()
    assert said.startswith("2 artifacts, ") and gangs.startswith("2 gangs' boards and logs, 2.")
    assert artifacts.main(["list", "convert"]) == 0 and "gangs" not in capsys.readouterr().out


def test_they_stay_while_their_training_is_young_or_under_way(store, gang, capsys):
    young, running = gang(0.1, run=0), gang(0.2, complete=False, run=99)
    store.write("gangs/turns/finetune-nodes.json", b"{}")
    with lease.hold(store, f"{running.replace('-', '/')}/lease.json", lambda _: None):
        assert artifacts.main(["gc", "--days", "7", "--delete"]) == 0
    assert left(store) == {young, running, "turns"}
    assert {one.gang for one in timeline.every(store)} == {young, running}


def test_they_go_when_their_training_is_old_and_so_does_their_history(store, gang, capsys):
    old = gang(0.1, days=8, run=0)  # the artifact stays: a run of today refers to it
    young = gang(0.2, days=3, run=8)
    gang(0.3, run=0)
    before = store.keys("")
    artifacts.main(["gc", "--days", "7"])
    said = capsys.readouterr().out
    assert f"would remove gangs/{old}  1." in said and store.keys("") == before
    artifacts.main(["gc", "--days", "7", "--delete"])
    assert old not in left(store) and store.read(f"{old.replace('-', '/')}/artifact.json")
    assert young not in left(store)  # nothing refers to its training any more
    assert len(left(store)) == len(timeline.every(store)) == 1


def test_without_days_what_nothing_refers_to_goes(store, gang, capsys):
    kept, gone = gang(0.1, days=99, run=99), gang(0.2, complete=False)
    artifacts.main(["gc", "--delete"])
    assert left(store) == {kept} and gone not in capsys.readouterr().err
