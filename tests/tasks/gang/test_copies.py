"""Copies of checkpoints in the store: parts of hosts, what is kept, and what a new host gets."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.load import load
from contract import checkpoints
from tasks.gang import copier as copiers
from tasks.gang import own_files
from tasks.gang.board import Board
from tasks.gang.collector import part
from tasks.gang.copier import Copier
from tasks.gang.copies import METRICS, Copies, decoded
from tasks.gang.messages import Word
from tasks.run import artifact
from tasks.run.artifact import Stage
from tasks.store import Store, open_store
from tests.tasks.gang.conftest import wait_for

GANG = "train-0123456789abcdef"
RANKS = {"a": range(0, 2), "b": range(2, 4)}  # of two hosts


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    for name in ("TICK", "QUIET", "AGAIN"):
        monkeypatch.setattr(copiers, name, getattr(copiers, name) / 20)


class Host:
    """A host with a disk of its own, whose ranks write checkpoints."""

    def __init__(self, folder: Path, store: Store, name: str):
        self.output, self.first = folder / name / "files", name == "a"
        self.name, self.said = name, dict[str, Any]()
        self.link = SimpleNamespace(
            word=Word("controller", "go"), node=sorted(RANKS).index(name), board=Board(store, GANG, 1), say=self._say
        )
        self.output.mkdir(parents=True)

    def _say(self, **news: Any) -> None:
        self.said |= news

    def copier(self) -> Copier:
        return Copier(cast(Any, self.link), self.output, RANKS[self.name], self.first)

    def save(self, step: int, **facts: Any) -> None:
        folder = checkpoints.step_folder(self.output / "checkpoints", step)
        for rank in RANKS[self.name]:
            for place in (folder, folder / "ema"):
                place.mkdir(parents=True, exist_ok=True)
                (place / f"__{rank}_0.distcp").write_bytes(bytes([rank, step]) * 9)
        if self.first:
            (folder / "train_state.pt").write_bytes(b"state")
            with (self.output / METRICS).open("a") as file:
                file.writelines(json.dumps({"step": n, "kind": "train"}) + "\n" for n in range(step - 9, step + 3))
            checkpoints.mark(folder, step=step, **facts)

    def hears(self, **news: Any) -> None:
        word = vars(self.link.word) | news
        self.link.word = Word(**word)


def copied(store: Store, hosts: list[Host], step: int, **facts: Any) -> None:
    """Save and copy a checkpoint, as the controller has it done."""
    for host in reversed(hosts):
        host.save(step, **facts)
    wait_for(lambda: hosts[0].said.get("saved") == step)
    for host in hosts:
        host.hears(copy=step)
    wait_for(lambda: all(host.said.get("copied") == step for host in hosts))
    board = hosts[0].link.board
    entries = [store.read(f"{board.place}/{part(step, host.link.node)}") for host in hosts]
    Copies(store, GANG).complete(step, [decoded(entry[0]) for entry in entries if entry])
    for host in hosts:
        host.hears(copied=step)


def test_a_new_host_gets_the_parts_of_all(store, tmp_path):
    hosts = [Host(tmp_path, store, name) for name in RANKS]
    copying = [host.copier() for host in hosts]
    copied(store, hosts, 10)
    copied(store, hosts, 20, samples=7)
    wait_for(lambda: len([*hosts[1].output.glob("checkpoints/iter_*")]) == 1)  # what is copied is not kept twice
    for one in copying:
        one.finish(True, lambda: False)
    assert checkpoints.complete_steps(hosts[0].output / "checkpoints") == [10, 20]  # as training has left them
    copies = Copies(store, GANG)
    new = tmp_path / "new"
    run = load("tiny", [f"paths.output={new}"])
    (new / "checkpoints/iter_0000030").mkdir(parents=True)  # of an attempt that failed
    own_files.resume(run, copies, 20, True, lambda *_: None)
    folder = new / "checkpoints/iter_0000020"
    assert [path.name for path in (new / "checkpoints").glob("iter_*")] == [folder.name]
    names = {f"__{rank}_0.distcp" for rank in range(4)}
    mark = checkpoints.read_mark(folder)
    assert mark and {*mark["files"]} == names | {f"ema/{name}" for name in names} | {"train_state.pt"}
    assert (mark["step"], mark["samples"]) == (20, 7)
    assert (folder / "ema/__3_0.distcp").read_bytes() == bytes([3, 20]) * 9
    assert (new / "checkpoints/latest_train_state.pt").read_bytes() == b"state"
    lines = [json.loads(line)["step"] for line in (new / METRICS).read_text().splitlines()]
    assert max(lines) == 20


def test_a_checkpoint_that_training_removes_meanwhile_is_copied(store, tmp_path):
    hosts = [Host(tmp_path, store, name) for name in RANKS]
    for host in hosts:
        host.copier()
    for host in reversed(hosts):
        host.save(10)
    wait_for(lambda: hosts[0].said.get("saved") == 10)
    checkpoints.remove_older(hosts[0].output / "checkpoints", 1, None)
    own_files.remove_others(hosts[0].output, [])
    hosts[0].hears(copy=10)
    wait_for(lambda: hosts[0].said.get("copied") == 10)
    entry = store.read(f"{hosts[0].link.board.place}/{part(10, 0)}")
    assert entry and "__0_0.distcp" in decoded(entry[0])


def test_a_part_that_is_gone_is_not_recorded(store, tmp_path):
    host = Host(tmp_path, store, "b")
    host.copier()
    host.hears(copy=10)
    wait_for(lambda: host.said.get("copied") == 10)
    assert store.read(f"{host.link.board.place}/{part(10, 1)}") is None


def test_a_store_that_is_away_is_tried_again(store, tmp_path, monkeypatch):
    host, outages = Host(tmp_path, store, "a"), [OSError("no answer"), OSError("no answer")]
    one = host.copier()
    put = type(store).put

    def late(*of: Any, **how: Any) -> Any:
        if outages:
            raise outages.pop()
        return put(*of, **how)

    monkeypatch.setattr(type(store), "put", late)
    host.save(10)
    wait_for(lambda: host.said.get("saved") == 10)
    host.hears(copy=10)
    wait_for(lambda: host.said.get("copied") == 10)
    assert outages == []
    began = time.monotonic()
    one.finish(False, lambda: time.monotonic() - began > 1)  # the controller does not record it
    assert time.monotonic() - began >= 1


def test_the_store_keeps_what_checkpoint_keep_says(store):
    copies = Copies(store, GANG)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None)):
        store.write(f"{copies.files}/checkpoints/iter_{step:07d}/x", b"x")
        facts = {"validations": {"loss": loss}} if loss else {}
        copies.write_mark(step, json.dumps(facts).encode())
        copies.complete(step, [{"x": store.put(_one_file(store), "x", kept=lambda _: True)["x"]}])
    assert copies.needed(None, False) == [10, 20, 30, 40]
    assert copies.needed(2, False) == [30, 40] and copies.needed(1, True) == [20, 40]
    copies.remove(10)
    assert copies.steps() == [20, 30, 40] and "iter_0000010" not in str({*store.keys("")})
    copies.forget()
    assert copies.newest() == 0 and not store.keys(copies.files)


def _one_file(store: Store) -> Path:
    folder = Path(store.uri.removeprefix("file://")).with_name("one")
    folder.mkdir(exist_ok=True)
    (folder / "x").write_bytes(b"x")
    return folder


def test_artifacts_reach_a_host_once_and_paths_become_its_own(s3_url, tmp_path, monkeypatch):
    from tests.support import s3_server

    _, bucket = s3_server.bucket_of_test(s3_url, monkeypatch)
    store, flow, own = open_store(f"s3://{bucket}/x"), tmp_path / "flow", tmp_path / "own"
    stage = Stage("convert", 1)

    def make(work: artifact.Work) -> dict[str, Any]:
        (work.files / "weights").write_bytes(b"w" * 99)
        return {}

    made = artifact.get_or_make(stage, store, make, tmp_path / "work", lambda _: None, {"flow": "x"})
    there = artifact.local(made, store, flow / "cache")
    run = load("tiny", [f"paths.base={there}", f"paths.output={flow}/work/train-1/files", "paths.data=/elsewhere"])
    monkeypatch.setenv("FINETUNE_RUNS", str(own))
    here = own_files.local_run(run, flow, store, lambda *_: None)
    assert here.paths.output == f"{own}/work/train-1/files" and here.paths.data == "/elsewhere"
    assert here.paths.base.startswith(str(own)) and (Path(here.paths.base) / "weights").read_bytes() == b"w" * 99
    monkeypatch.setattr(type(store), "get", None)  # the second start finds them
    assert own_files.local_run(run, flow, store, lambda *_: None) == here
    monkeypatch.delenv("FINETUNE_RUNS")
    assert own_files.local_run(run, flow, store, lambda *_: None) == run
