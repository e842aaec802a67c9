"""Copies of checkpoints in the store: parts of hosts, kept copies, and files of a new host."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.load import load
from contract import checkpoints
from contract.faults import Fault
from contract.signs_of_life import JOURNAL
from tasks.gang import collector, own_files, results
from tasks.gang import copier as copiers
from tasks.gang.board import Board
from tasks.gang.collector import Collector
from tasks.gang.copier import Copier
from tasks.gang.copies import METRICS, Copies, decoded, encoded, part
from tasks.gang.history import spent
from tasks.gang.messages import Member, Word
from tasks.gang.results import Results
from tasks.run import artifact
from tasks.run.artifact import Stage
from tasks.store import File, Store, open_store
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
    """A host that shares no disk, and the checkpoints of its ranks."""

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
        return Copier(cast(Any, self.link), self.output, RANKS[self.name], self.first, (METRICS,))

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
    assert Copies(store, GANG).complete(step, board, [host.link.node for host in hosts])
    for host in hosts:
        host.hears(copied=step)


def test_a_new_host_gets_the_parts_of_all(store, tmp_path):
    hosts = [Host(tmp_path, store, name) for name in RANKS]
    copying = [host.copier() for host in hosts]
    copied(store, hosts, 10)
    copied(store, hosts, 20, samples=7)
    wait_for(lambda: len([*hosts[1].output.glob("checkpoints/iter_*")]) == 1)  # copied ones are removed here
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


def test_a_copy_with_a_flipped_bit_is_named_and_no_longer_used(store, tmp_path):
    hosts = [Host(tmp_path, store, name) for name in RANKS]
    for host in hosts:
        host.copier()
    copied(store, hosts, 10)
    copied(store, hosts, 20)
    copies = Copies(store, GANG)
    name = f"{copies.files}/checkpoints/iter_0000020/__2_0.distcp"
    store.write(name, bytes([2, 21]) * 9)
    run = load("tiny", [f"paths.output={tmp_path}/new"])
    with pytest.raises(Fault, match=f"checkpoint 20: .*/{name}: content differs"):
        own_files.resume(run, copies, 20, True, lambda *_: None)
    assert checkpoints.complete_steps(tmp_path / "new/checkpoints") == [] and copies.newest() == 10
    own_files.resume(run, copies, 10, True, lambda *_: None)
    assert checkpoints.complete_steps(tmp_path / "new/checkpoints") == [10]


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
    copies, board = Copies(store, GANG), Board(store, GANG, 1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None)):
        store.write(f"{copies.files}/checkpoints/iter_{step:07d}/x", b"x")
        facts = {"validations": {"loss": loss}} if loss else {}
        copies.write_mark(step, json.dumps(facts).encode())
        board.write(part(step, 0), encoded({"x": File(1, "", "")}))
        assert copies.complete(step, board, [0])
    assert copies.complete(50, board, [0]) is None
    assert copies.needed(None, False) == [10, 20, 30, 40]
    assert copies.needed(2, False) == [30, 40] and copies.needed(1, True) == [20, 40]
    copies.remove(10)
    assert copies.steps() == [20, 30, 40] and "iter_0000010" not in str({*store.keys("")})
    copies.forget()
    assert copies.newest() == 0 and not store.keys(copies.files)


def test_artifacts_reach_a_host_once_and_paths_become_its_own(s3_url, tmp_path, monkeypatch):
    from tests.support import s3_server

    _, bucket = s3_server.bucket_of_test(s3_url, monkeypatch)
    store, flow, own = open_store(f"s3://{bucket}/x"), tmp_path / "flow", tmp_path / "own"
    stage = Stage("convert", 1)

    def make(work: artifact.Work) -> dict[str, Any]:
        (work.files / "merged").mkdir()
        for name in ("weights", "parity.json", "merged/model"):
            (work.files / name).write_bytes(b"w" * 99)
        return {}

    made = artifact.get_or_make(stage, store, make, tmp_path / "work", lambda _: None, {"flow": "x"})
    there = artifact.local(made, store, flow / "cache")
    paths = [f"paths.base={there}", f"paths.output={flow}/work/train-1/files", "paths.data=/elsewhere"]
    run = load("tiny", paths)
    monkeypatch.setenv("FINETUNE_RUNS", str(own))
    here = own_files.local_run(run, flow, store, lambda *_: None)
    assert here.paths.output == f"{own}/work/train-1/files" and here.paths.data == "/elsewhere"
    assert here.paths.base.startswith(str(own)) and (Path(here.paths.base) / "weights").read_bytes() == b"w" * 99
    served = load("tiny", [f"paths.served={there}/merged", f"paths.parity={there}/parity.json"])
    parts = Path(own_files.local_run(served, flow, store, lambda *_: None).paths.served).parent
    assert {path.name for path in parts.rglob("*") if path.is_file()} == {"model", "parity.json"}
    monkeypatch.setattr(type(store), "get", None)  # the second start finds them
    assert own_files.local_run(run, flow, store, lambda *_: None) == here
    monkeypatch.delenv("FINETUNE_RUNS")
    assert own_files.local_run(run, flow, store, lambda *_: None) == run


class Gang:
    """A controller's view of two members, and its lines."""

    def __init__(self, store: Store, folder: Path, *overrides: str):
        self.board, self.lines = Board(store, GANG, 2), list[str]()
        self.word = Word("controller", "go", order=(1, 0), apart=(0, 1))
        self.nodes = {k: Member(str(k), f"host{k}", "running") for k in (0, 1)}
        run, followed = load("tiny", [*overrides]), [folder / METRICS, folder / JOURNAL]
        Collector(Copies(store, GANG), cast(Any, self), run, followed, self.lines.append)

    def say(self, **news: Any) -> None:
        self.word = replace(self.word, **news)

    def member(self, k: int, **news: Any) -> None:
        self.nodes[k] = replace(self.nodes[k], **news)


@pytest.fixture
def gang(store, tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "TICK", 0.02)
    made = Gang(store, tmp_path, "checkpoint.keep=1")
    yield made
    made.say(closed=True)


def test_ranks_start_when_all_hosts_have_their_files(gang):
    gang.member(0, ready=True)
    time.sleep(0.1)
    assert not gang.word.start
    gang.member(1, ready=True)
    wait_for(lambda: gang.word.start)


def test_one_checkpoint_at_a_time_is_complete_when_all_parts_are_there(gang, store):
    copies = Copies(store, GANG)
    for step in (10, 30):
        gang.member(1, saved=step)
        wait_for(lambda step=step: gang.word.copy == step)
        gang.member(1, saved=step + 10)  # the next one waits
        gang.board.write(part(step, 1), encoded({".metadata": File(1, "", "")}))
        gang.member(1, copied=step)
        time.sleep(0.1)
        assert (gang.word.copy, step in copies.steps()) == (step, False)
        gang.board.write(part(step, 0), encoded({"__0_0.distcp": File(2, "", "")}))
        gang.member(1, saved=step)
        gang.member(0, copied=step)
        wait_for(lambda step=step: gang.word.copied == step)
        assert copies.record(step).keys() == {f"checkpoints/iter_{step:07d}/{n}" for n in (".metadata", "__0_0.distcp")}
    wait_for(lambda: copies.steps() == [30])  # checkpoint.keep


def test_a_checkpoint_without_a_part_is_given_up(gang, store):
    gang.member(1, saved=10)
    wait_for(lambda: gang.word.copy == 10)
    for k in (0, 1):
        gang.member(k, copied=10)
    wait_for(lambda: gang.word.copy == 0)
    assert "checkpoint 10: a host had removed its part before it was copied" in gang.lines
    gang.member(1, saved=20)
    wait_for(lambda: gang.word.copy == 20)
    assert Copies(store, GANG).newest() == 0


def test_metrics_are_followed(gang, store, tmp_path):
    (tmp_path / METRICS).write_text("of the last attempt\n")
    gang.board.write(f"logs/1/{METRICS}.00000", b"1\n2\n3")
    wait_for(lambda: (tmp_path / METRICS).read_text() == "1\n2\n")
    gang.board.write(f"logs/1/{METRICS}.00001", b"0\n4\n")
    wait_for(lambda: (tmp_path / METRICS).read_text() == "1\n2\n30\n4\n")


def test_the_journal_has_the_phases_of_all_attempts(gang, store, tmp_path):
    """The first host may know only the attempts that ran there, and the flow's host some phases of this one."""

    def phases(*steps: int, **start: int) -> str:
        lines = [{"time": 1.0, "step": step, "seconds": {"training": 1.0}} for step in steps]
        return "".join(json.dumps(line | (start if line is lines[0] else {})) + "\n" for line in lines)

    first, second = phases(0, 1, 2, start=0, attempt=1), phases(2, 3, start=2, attempt=2)
    (tmp_path / JOURNAL).write_text(first + phases(2, start=2, attempt=2))  # before the flow was started again
    gang.board.write(f"logs/1/{JOURNAL}.00000", phases(0, start=0, attempt=1).encode())
    time.sleep(0.1)
    gang.board.write(f"logs/1/{JOURNAL}.00001", second.encode())
    wait_for(lambda: (tmp_path / JOURNAL).read_text() == first + second)
    gang.board.write(f"logs/1/{JOURNAL}.00002", phases(4).encode())
    wait_for(lambda: (tmp_path / JOURNAL).read_text() == first + second + phases(4))
    assert [len(lines) for lines in spent.read(tmp_path)] == [3, 3]


def test_answers_reach_the_flow(store, tmp_path):
    """Of the first host; those of an earlier attempt on the same host are not its answers."""
    hosts = [Host(tmp_path, store, name) for name in RANKS]
    (hosts[0].output / "results.json").write_text("old")
    made = [Results(cast(Any, host.link), host.output, host.first, ("progress.jsonl",)) for host in hosts]
    for host, name in zip(hosts, ("results.json", "log.txt"), strict=True):
        assert not (host.output / "results.json").exists()
        host.output.mkdir(exist_ok=True)
        (host.output / name).write_text("new")
    made[0].finish(False, lambda: False)
    results.fetch(hosts[0].link.board, tmp_path / "flow")
    assert not (tmp_path / "flow").exists()
    for one in made:
        one.finish(True, lambda: False)
    results.fetch(hosts[0].link.board, tmp_path / "flow")
    assert [path.name for path in (tmp_path / "flow").iterdir()] == ["results.json"]
