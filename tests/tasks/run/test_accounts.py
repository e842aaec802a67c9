"""Owner, project, quotas and costs of runs."""

import json
import threading
import time
from contextlib import nullcontext

import pytest

from conf.load import load
from contract.faults import Fault, Stopped
from flows import artifacts, costs
from tasks.run import accounts
from tasks.store import open_store

NOW = time.time()


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("FINETUNE_OWNER", "ada")
    made = open_store(str(tmp_path / "store"))
    notes = [
        ("ada", "nlp", 30.0, NOW),
        ("bob", "nlp", 60.0, NOW),
        ("bob", "vision", 5.0, NOW),
        ("ada", "nlp", 7.0, 0.0),
    ]
    for number, (owner, project, hours, started) in enumerate(notes):
        note = {"artifacts": [f"train/{number:016x}"], "started": started, "owner": owner, "project": project}
        made.write(f"runs/{number}.json", json.dumps(note | {"gpu_hours": hours, "usd": 2 * hours}).encode())
    made.write("runs/old.json", json.dumps({"artifacts": [], "started": 0.0}).encode())  # of an earlier version
    return made


def run(*overrides: str):
    return load("tiny", list(overrides))


def test_owner_is_the_key_then_the_variable_then_the_login_name(monkeypatch):
    monkeypatch.setenv("FINETUNE_OWNER", "ada")
    assert accounts.owner(run("track.owner=bob")) == "bob"
    assert accounts.labels(run("track.project=nlp")) == ["owner:ada", "project:nlp"]
    monkeypatch.delenv("FINETUNE_OWNER")
    monkeypatch.setattr("getpass.getuser", lambda: "carol")
    assert accounts.tags(run())["mlflow.user"] == "carol"
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid"])  # a container's user without a name
    assert accounts.owner(run()).startswith("uid-")


def test_costs_are_summed_by_project_and_owner_in_the_month(store, capsys, monkeypatch):
    monkeypatch.setattr(accounts, "quotas", lambda: {"nlp": {"gpu_hours": 100}})
    assert accounts.of_project(store, "nlp") == accounts.Usage(2, 90.0, 180.0)
    assert costs.main(["--project", "nlp"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:5] for row in rows[1:3]] == [["nlp", "ada", "1", "30", "60"], ["nlp", "bob", "1", "60", "120"]]
    assert rows[-1].split()[-3:] == ["2", "90", "180"]
    assert costs.main(["--month", "1970-01"]) == 0
    assert "nlp" in capsys.readouterr().out


def test_a_run_beyond_the_quota_is_refused(store, monkeypatch):
    monkeypatch.setattr(accounts, "quotas", lambda: {"nlp": {"gpu_hours": 100}, "vision": {"usd": 10}})
    accounts.require_quota(run("track.project=nlp"), store, {"gpu_hours": 9.0})
    accounts.require_quota(run("track.project=other"), store, {"gpu_hours": 1e6})
    with pytest.raises(Fault, match=r"project nlp: has used 90 of 100 GPU hours .* needs 11; .*finetune_quotas"):
        accounts.require_quota(run("track.project=nlp"), store, {"gpu_hours": 11.0})
    with pytest.raises(Fault, match="project vision: has used 10 of 10 USD"):
        accounts.require_quota(run("track.project=vision"), store, {})


@pytest.mark.parametrize(
    "wrong", [[], {"nlp": 5}, {"nlp": {"hours": 5}}, {"nlp": {"usd": "5"}}, {"nlp": {"usd": True}}]
)
def test_wrong_quotas_are_reported(wrong, monkeypatch):
    monkeypatch.setattr("prefect.variables.Variable.get", lambda name, default: wrong)
    with pytest.raises(Fault, match="finetune_quotas: must be like"):
        accounts.quotas()


def test_a_stage_waits_for_gpus_of_its_project(monkeypatch):
    tries, lines, stop = [], [], threading.Event()

    def concurrency(name, count, timeout_seconds):
        tries.append((name, count))
        if len(tries) < 3:
            raise TimeoutError
        return nullcontext()

    monkeypatch.setattr(accounts, "concurrency", concurrency)
    monkeypatch.setattr(accounts, "_limit", lambda name: 8)
    with accounts.gpus_of_project("nlp", 4, "train", lines.append, stop.is_set):
        assert tries == [("project-nlp", 4)] * 3 and len(lines) == 1 and "may use 8 GPUs at once" in lines[0]
    with (
        pytest.raises(Fault, match=r"may use 8 GPUs at once .* takes 16"),
        accounts.gpus_of_project("nlp", 16, "train", lines.append, stop.is_set),
    ):
        pass
    tries.clear()
    stop.set()
    with pytest.raises(Stopped), accounts.gpus_of_project("nlp", 4, "train", lines.append, stop.is_set):
        pass


def test_old_runs_of_another_owner_keep_their_artifacts(store, capsys):
    for owner in ("ada", "bob"):
        key = f"train/{owner.encode().hex():0>16}"
        store.write(f"{key}/files/a", b"a")
        note = {"artifacts": [key], "started": 0.0, "owner": owner, "project": "nlp"}
        store.write(f"runs/{owner}.json", json.dumps(note).encode())
    bobs = f"train/{b'bob'.hex():0>16}"
    assert artifacts.main(["gc", "--days", "1", "--delete"]) == 0
    assert bobs not in capsys.readouterr().out and store.keys(bobs) and store.read("runs/bob.json")
    assert not store.keys(f"train/{b'ada'.hex():0>16}") and not store.read("runs/ada.json")
    assert artifacts.main(["gc", "--days", "1", "--delete", "--all-owners"]) == 0
    assert not store.keys(bobs)
