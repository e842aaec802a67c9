"""The controller with an engine and members that are threads, all times divided by FASTER: nobody trains."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from conf.load import load
from conf.planner.fewer_hosts import fewer_hosts
from conf.rules.gpus import takes
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Stopped
from tasks.gang import controller
from tasks.gang.attempt import Gang
from tasks.gang.board import Board
from tasks.gang.controller_link import Lookout
from tasks.gang.diagnosis import next_step
from tasks.gang.engines import Demand, spared
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import Job, Training
from tasks.gang.member_link import Link
from tasks.gang.messages import End, Member, Sign, Task
from tasks.run.launch import Broken
from tasks.stages.run_job import job_of
from tasks.store import Store, open_store
from tests.tasks.gang.compete import CONF, TIMES, Mortal
from tests.tasks.gang.conftest import wait_for

FASTER = 10.0
STEPS = 1


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    for module, names in TIMES.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) / FASTER)


@dataclass
class Hosts:
    """An engine of hosts by name. What a member does on one, attempt by attempt, is in `acts`; else it trains."""

    names: list[str]
    acts: dict[str, list[str]] = field(default_factory=dict)  # train, die, fail, fail later, silent, told, never, ...
    places: dict[str, str] = field(default_factory=dict)
    given: list[list[str]] = field(default_factory=list)  # of each attempt, by member
    words: dict[str, dict] = field(default_factory=dict)  # the controller's, as members saw it when they went
    saved: list[str] = field(default_factory=list)  # those that were told to save before they end
    away: list[str] = field(default_factory=list)  # what is said instead of a start
    store: Store | None = None
    output: str = ""
    busy: set[str] = field(default_factory=set)
    trained: threading.Event = field(default_factory=threading.Event)  # members end their training then
    over: list[str] = field(default_factory=list)
    later: threading.Event = field(default_factory=threading.Event)  # starts the acts "die later" and "stay later"
    lost: list[set[int]] = field(default_factory=list)  # members that the gang had lost when it asked for another one

    def turn(self, demand: Demand) -> str | None:
        return "hosts"

    def capacity(self, demand: Demand, without: tuple[str, ...] = ()) -> str | None:
        free = [name for name in self.names if name not in self.busy and name not in without]
        return None if len(free) >= demand.nodes else f"{demand.nodes}, where {len(free)} are free"

    def available(self, demand: Demand, without: tuple[str, ...] = ()) -> int:
        return sum(name not in without for name in self.names)

    def start(self, demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> "Handle":
        if self.away:
            raise ConnectionError(self.away.pop())
        free = [name for name in self.names if name not in self.busy]
        chosen = sorted(free, key=lambda name: name in without)[:n]
        self.given.append(chosen)
        handle = Handle([], [])
        for node, host in enumerate(chosen):
            self.add(handle, host, node, board)
        return handle

    def another(
        self, demand: Demand, board: Board, handle: "Handle", without: tuple[str, ...], lost: set[int]
    ) -> int | None:
        if self.away:
            raise ConnectionError(self.away.pop())
        self.lost.append(lost)
        out = spared(without, lambda out: self.available(demand, out) >= demand.nodes)
        free = [name for name in self.names if name not in self.busy and name not in out]
        if not free:
            return None
        self.given.append(free[:1])
        self.add(handle, free[0], len(handle.threads), board)
        return len(handle.threads) - 1

    def add(self, handle: "Handle", host: str, node: int, board: Board) -> None:
        self.busy.add(host)
        thread = threading.Thread(target=self.be, args=(host, node, board, handle.ended), daemon=True)
        handle.threads.append(thread)
        thread.start()

    def be(self, host: str, node: int, board: Board, ended: list[int]) -> None:
        act = self.next_act(host)
        try:
            if act != "never":
                self.member(host, node, board, act)
                if act != "vanish":  # the engine does not notice that one
                    ended.append(node)
        finally:
            self.over.append(f"{host} {board.attempt}")
            self.busy.discard(host)

    def next_act(self, host: str) -> str:
        return self.acts[host].pop(0) if self.acts.get(host) else "train"

    def member(self, host: str, node: int, board: Board, act: str) -> None:
        found = board.pulse()
        assert found
        assert self.store
        store = Mortal(self.store, host)
        probe, place = Path(found[0].probe), self.places.get(host, "")
        token = probe.read_text() if probe.exists() else ""
        me = Member(f"{host} {board.attempt}", host, "waiting", host, 1, 2, token, place)
        one = Link(Board(store, board.gang, board.attempt), node, me)  # type: ignore[arg-type]
        if not one.join():
            return
        went = False
        if act in ("stay", "hang"):
            wait_for(lambda: one.word.state == "go")
            self.lose_a_rank(one, host, node, act == "hang")
            return
        while not (why := one.why_stop()):
            time.sleep(0.01)
            if node not in one.word.order:
                continue
            if not went:
                went = True
                self.words[me.by] = one.word
                one.say(state="running", ranks=(Sign(node, 1, 1, "training", 0.0, 0.0, "S", False, False),))
            if act == "stay later" and self.later.is_set():
                self.lose_a_rank(one, host, node)
                return
            if act == "die later" and self.later.is_set():
                act = "die"
            if act == "told":
                one.say(state="stopping", reason="told to end", told=True)
                act = "wait"
            if act in ("die", "vanish"):
                store.dead.set()
                one.end(0)
                return
            if act.startswith("fail"):
                time.sleep(0.5 * (act == "fail later"))
                break
            if act == "silent":
                act = "train"
                store.dead.set()
                time.sleep(13 / FASTER)
                store.dead.clear()
            if act == "answer" or (act == "train" and self.trained.is_set()):
                mark(self.output)
                one.say(state="done", over=True)
                one.end(5)
                return
        if why:
            if one.word.save:
                self.saved.append(host)
            one.say(state="preempted" if act == "wait" else "stopped", reason=why, over=True)
            self.stay(one, host, node)
            return
        else:
            error = "Connection reset by peer" if act == "fail by a connection" else f"of {host}"
            stays = act == "fail and stay"
            end = End(node, 1, int(stays), (f"RuntimeError: {error}",), silent=False, state="", stalled=False)
            one.say(state="failed", failed=(end,), over=True)
            if stays:
                self.stay(one, host, node)
                return
        one.end(5)

    def lose_a_rank(self, one: Link, host: str, node: int, hangs: bool = False) -> None:
        end = End(node, None if hangs else -9, 1, (), silent=hangs, state="T" if hangs else "", stalled=False)
        one.say(state="failed", failed=(end,), over=True)
        self.stay(one, host, node)

    def stay(self, one: Link, host: str, node: int) -> None:
        """As a member does after its end: it joins the next attempt if the controller says so."""
        wait_for(lambda: one.word.closed or (one.word.state == "stop" and not one.word.stays) or one.why_leave(), 30)
        one.end(5)
        if node in one.word.again:
            self.member(host, node, Board(one.board.store, one.board.gang, one.word.next), self.next_act(host))


@dataclass
class Handle:
    threads: list[threading.Thread]
    ended: list[int]

    def alive(self) -> dict[int, bool | None]:
        return {k: False if k in self.ended else None for k in range(len(self.threads))}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        for thread in self.threads:
            thread.join(10)


def mark(output: str) -> None:
    """All steps are made, and in a checkpoint; all answers are there."""
    answers = Path(output) / "answers/results.json"
    answers.parent.mkdir(parents=True, exist_ok=True)
    answers.write_text("{}")
    save(output, STEPS)


def save(output: str, step: int) -> None:
    path = Path(output) / f"checkpoints/iter_{step:07d}/complete.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"files": {}}))


@dataclass
class Controlled:
    """A controller under way, in a thread."""

    run: Run
    folder: Path
    store: Store
    hosts: Hosts
    lines: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    tick: object = staticmethod(lambda: None)
    job: Callable[[Run], Job | None] = Training

    def train(self) -> None:
        job = self.job(self.run)
        assert job
        try:
            teller, fits = Teller(History("gang", "gang", ""), self.folder / "none"), fewer_hosts(job.run, job.trains)
            say, stop, engine = self.lines.append, self.cancelled.is_set, cast(Any, self.hosts)
            controller.carry_out(
                Gang("gang", self.folder, job, self.store, engine, teller, say, stop, lambda: self.tick(), fits)
            )
        except BaseException as error:
            self.error = error

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.train, daemon=True)
        thread.start()
        return thread

    def ends_well(self) -> None:
        self.train()
        if self.error:
            raise self.error


@pytest.fixture
def gang(tmp_path, monkeypatch):
    """gang(hosts, overrides) -> a controller that is to be started."""

    stores: dict[str, Store] = {}

    def gang(hosts: Hosts, *overrides: str, nodes: int = 0, uri: str = "first") -> Controlled:
        hosts.store = hosts.store or open_store(str(tmp_path / "store"))
        stores[uri] = Mortal(hosts.store, uri)  # type: ignore[assignment]
        conf = tmp_path / "gang.yaml"
        conf.write_text(CONF.format(name="gang", nodes=nodes or len(hosts.names), folder=tmp_path))
        run = load(conf, [*overrides, *(["gang.start_within=20"] if "start_within" not in str(overrides) else [])])
        run = run.model_copy(update={"gang": run.gang.model_copy(update={"silent_after": 12 / FASTER})})
        hosts.output = run.paths.output
        folder = tmp_path / uri
        folder.mkdir()
        return Controlled(run, folder, stores[uri], hosts)

    return gang


def test_what_shows_progress_may_hang_and_a_dead_host_is_noticed_all_the_same(gang):
    hosts, hangs = Hosts(["a", "b"], {"b": ["die"]}), threading.Event()
    one = gang(hosts, "gang.retries=0")
    one.tick = lambda: hangs.wait(60)
    running, began = one.start(), time.monotonic()
    running.join(40)
    hangs.set()
    assert isinstance(one.error, Broken) and "b no longer answers" in str(one.error)
    assert time.monotonic() - began < 30


def test_hosts_stay_after_a_killed_rank_and_are_given_back_after_the_second(gang):
    hosts = Hosts(["a", "b"], {"a": ["stay"], "b": ["train", "stay"]})
    threading.Timer(8, hosts.trained.set).start()
    one = gang(hosts)
    one.ends_well()
    assert hosts.given == [["a", "b"], ["a", "b"]]
    assert set(hosts.words) == {"b 1", "a 2", "a 3", "b 3"}
    assert sum("stay and continue at once" in line for line in one.lines) == 1
    assert "preflight: false" in Board(one.store, "gang", 2).text("resolved.yaml")


def test_hosts_stay_after_a_rank_that_hangs_and_are_measured_again(gang):
    hosts = Hosts(["a", "b"], {"a": ["hang"]})
    threading.Timer(4, hosts.trained.set).start()
    one = gang(hosts)
    one.ends_well()
    assert hosts.given == [["a", "b"]] and {"a 2", "b 2"} <= {*hosts.words}
    assert any(line.startswith("hang: rank 0 on a") for line in one.lines)
    assert "preflight: false" not in Board(one.store, "gang", 2).text("resolved.yaml")


def test_a_spare_host_replaces_a_lost_one_at_once(gang):
    hosts = Hosts(["a", "b", "c"], {"b": ["die"]})
    threading.Timer(15, hosts.trained.set).start()
    one = gang(hosts, "gang.spares=1", nodes=2)
    one.ends_well()
    assert hosts.given == [["a", "b", "c"], ["b"]]
    assert hosts.words["c 2"].order == (0, 2)


def test_a_host_that_comes_back_is_a_spare_host_again(gang, monkeypatch):
    """It replaces the next lost host at once, if a checkpoint was written between."""
    monkeypatch.setattr("tests.tasks.gang.test_controller.STEPS", 2)
    hosts = Hosts(["a", "b", "c"], {"b": ["die"], "c": ["train", "die later"]})
    one = gang(hosts, "gang.spares=1", "train.steps=2", nodes=2)
    running = one.start()
    wait_for(lambda: "b has joined attempt 2 as a spare host" in one.lines, 40)
    assert hosts.lost[0] == {1}
    save(hosts.output, 1)
    hosts.later.set()
    wait_for(lambda: "a 3" in hosts.words, 40)
    hosts.trained.set()
    running.join(40)
    assert one.error is None and hosts.words["b 3"].order == (0, 3)
    assert hosts.given[:2] == [["a", "b", "c"], ["b"]]
    assert sum("stay and continue at once" in line for line in one.lines) == 2


def test_members_that_stay_for_the_next_attempt_are_not_taken_for_lost_ones(gang, monkeypatch):
    monkeypatch.setattr("tasks.gang.spare_hosts.LOOKED", 0.02)  # also between a failure and the controller's verdict
    hosts = Hosts(["a", "b", "c"], {"a": ["fail and stay"]})
    threading.Timer(6, hosts.trained.set).start()
    one = gang(hosts, "gang.spares=1", nodes=2)
    one.ends_well()
    assert hosts.given == [["a", "b", "c"]] and hosts.lost == []
    assert sum("stay and continue at once" in line for line in one.lines) == 1


def test_an_engine_that_does_not_answer_is_asked_for_a_spare_host_again(gang):
    hosts = Hosts(["a", "b", "c"], {"b": ["die"]})
    one = gang(hosts, "gang.spares=1", nodes=2)
    running = one.start()
    wait_for(lambda: "a 1" in hosts.words, 40)
    hosts.away = ["no answer"] * 2
    wait_for(lambda: "b has joined attempt 2 as a spare host" in one.lines, 40)
    hosts.trained.set()
    running.join(40)
    assert one.error is None and one.lines.count("no spare host: ConnectionError: no answer") == 1


def test_a_host_whose_members_never_join_is_asked_less_and_less_often(gang):
    hosts = Hosts(["a", "b", "c"], {"b": ["die", *["never"] * 20]})
    threading.Timer(30, hosts.trained.set).start()
    gang(hosts, "gang.spares=1", "gang.start_within=1", nodes=2).ends_well()
    assert 3 <= len(hosts.given) <= 6 and hosts.given[1:] == [["b"]] * (len(hosts.given) - 1)


def test_a_host_that_failed_twice_stays_if_there_are_too_few_others(gang, monkeypatch):
    monkeypatch.setattr("tests.tasks.gang.test_controller.STEPS", 3)
    hosts = Hosts(["a", "b"], {"a": ["stay", "stay later"]})
    one = gang(hosts, "train.steps=3", nodes=2)
    running = one.start()
    wait_for(lambda: "a 2" in hosts.words, 40)
    save(hosts.output, 1)
    hosts.later.set()
    wait_for(lambda: "a 3" in hosts.words, 40)
    hosts.trained.set()
    running.join(40)
    assert one.error is None and hosts.given == [["a", "b"]]
    assert sum("continues without a" in line for line in one.lines) == 1


def test_a_lost_host_is_the_cause_although_the_others_report_a_lost_connection_first(gang):
    hosts = Hosts(["a", "b", "c"], {"a": ["fail by a connection"], "b": ["vanish"]})
    one = gang(hosts, "gang.retries=0")
    one.train()
    assert isinstance(one.error, Broken) and "b no longer answers" in str(one.error)


def test_a_lost_connection_is_the_cause_if_all_hosts_answer(gang):
    one = gang(Hosts(["a", "b"], {"a": ["fail by a connection"]}), "gang.retries=0")
    one.train()
    assert isinstance(one.error, Broken) and str(one.error).startswith("network: rank 0 on a")


def test_a_gang_starts_without_spare_hosts_if_there_are_none(gang):
    hosts = Hosts(["a", "b"])
    hosts.trained.set()
    gang(hosts, "gang.spares=1").ends_well()
    assert hosts.given == [["a", "b"]]


def test_a_gang_that_is_not_complete_in_time_gives_its_hosts_back(gang):
    hosts = Hosts(["a", "b"], {"b": ["never"]})
    hosts.trained.set()
    one = gang(hosts, "gang.start_within=3")
    one.ends_well()
    assert "host: 1 of 2 hosts joined within 3 s; begins again" in one.lines
    assert hosts.over[:2] == ["b 1", "a 1"] and len(hosts.given) == 2


def test_a_scheduler_that_does_not_answer_is_asked_again(gang):
    hosts = Hosts(["a", "b"], away=["no answer"])
    hosts.trained.set()
    one = gang(hosts)
    one.ends_well()
    assert "network: no attempt: ConnectionError: no answer; begins again" in one.lines
    assert hosts.given == [["a", "b"]]


def test_an_attempt_that_cannot_be_announced_is_repeated(gang, monkeypatch):
    hosts, announce, errors = Hosts(["a", "b"]), controller.announce, [ConnectionError("no answer")]

    def announce_late(*of):
        if errors:
            raise errors.pop()
        return announce(*of)

    monkeypatch.setattr(controller, "announce", announce_late)
    hosts.trained.set()
    one = gang(hosts)
    one.ends_well()
    assert "network: no attempt: ConnectionError: no answer; begins again" in one.lines


def test_the_first_failure_is_the_one_that_is_told(gang):
    one = gang(Hosts(["a", "b"], {"a": ["fail later"], "b": ["fail"]}), "gang.retries=0")
    with pytest.raises(Broken, match="of b"):
        one.ends_well()


def test_a_member_that_is_silent_for_a_while_is_waited_for(gang, monkeypatch):
    monkeypatch.setattr(controller, "SETTLE", 5.0)
    hosts = Hosts(["a", "b"], {"b": ["silent"]})
    threading.Timer(3, hosts.trained.set).start()
    one = gang(hosts)
    one.run = one.run.model_copy(update={"gang": one.run.gang.model_copy(update={"silent_after": 1.0})})
    one.ends_well()
    assert len(hosts.given) == 1


def test_a_second_controller_waits_until_the_first_one_s_members_are_over(gang):
    hosts = Hosts(["a", "b"])
    first = gang(hosts)
    first.start()
    wait_for(lambda: len(hosts.words) == 2, 20)
    first.store.dead.set()  # its process is gone
    hosts.trained.set()
    second = gang(hosts, uri="second")
    second.ends_well()
    assert "waits until attempt 1, whose controller is gone, has ended" in second.lines
    assert {*hosts.over[:2]} == {"a 1", "b 1"} and len(hosts.given) == 2
    first.cancelled.set()


def test_fewer_hosts_begin_where_there_are_fewer_at_the_first_start(gang):
    hosts = Hosts(["a", "b"])
    hosts.trained.set()
    one = gang(hosts, "gang.start_within=1", "gang.min_nodes=2", nodes=3)
    one.ends_well()
    assert "2 of 3 hosts are available after 1 s; continues with 2" in one.lines
    assert [len(given) for given in hosts.given] == [2]


def test_fewer_hosts_go_on_where_one_does_not_come(gang):
    hosts = Hosts(["a", "b", "c"], {"c": ["never"]})
    hosts.trained.set()
    one = gang(hosts, "gang.start_within=3", "gang.min_nodes=2")
    one.ends_well()
    line = "host: 2 of 3 hosts joined within 3 s; continues with 2 of 3 hosts, without those that are gone"
    assert line in one.lines
    assert [len(given) for given in hosts.given] == [3, 2]


def test_hosts_that_others_use_are_waited_for_with_all(gang):
    hosts = Hosts(["a", "b", "c"], busy={"c"})
    hosts.trained.set()
    one = gang(hosts, "gang.start_within=0.5", "gang.min_nodes=1")
    running = one.start()
    time.sleep(2)
    assert hosts.given == []
    hosts.busy.clear()
    running.join(20)
    assert one.error is None and [len(given) for given in hosts.given] == [3]


def test_an_evaluation_is_over_when_its_first_host_has_the_answers(gang):
    hosts = Hosts(["a", "b", "c"], acts={"a": ["answer"], "b": ["compute"]})
    one = gang(hosts, "layout.nodes=3", "gang.min_nodes=1", "evaluate.nodes=2")
    one.job = partial(job_of, "evaluate")
    one.ends_well()
    assert hosts.given == [["a", "b"]] and sorted(hosts.over) == ["a 1", "b 1"]
    assert any(line.startswith("attempt 1: a, b evaluate; ") for line in one.lines)


def test_an_evaluation_begins_again_on_as_many_hosts_where_one_that_computes_is_lost(gang):
    hosts = Hosts(["a", "b", "c"], acts={"a": ["compute", "answer"], "b": ["die"], "c": ["compute"]})
    one = gang(hosts, "gang.min_nodes=1", "evaluate.nodes=2")
    one.job = partial(job_of, "evaluate")
    one.ends_well()
    assert hosts.given == [["a", "b"], ["a", "c"]]
    assert "host: b no longer answers; continues without b" in one.lines


def test_an_evaluation_is_no_gang_where_one_host_serves(gang):
    run = gang(Hosts(["a"])).run
    assert job_of("evaluate", run) is None
    elsewhere = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"engine": "slurm", "gpus": 4})})
    job = job_of("evaluate", elsewhere)
    hosts_have_them = run.model_copy(
        update={
            "gang": run.gang.model_copy(update={"engine": "slurm"}),
            "hardware": run.hardware.model_copy(update={"gpu": "h100"}),
        }
    )
    assert job_of("evaluate", hosts_have_them)
    assert job and job.conf(job.run) == elsewhere and job.run.gang.engine == "slurm"
    assert (job.run.layout.nodes, job.run.layout.gpus_per_node) == (1, 4)
    assert job.task(job.run) == Task("evaluate", nodes=1, gpus=4, ranks=1)


REINFORCED = (
    "reinforce.steps=1",
    "reinforce.start=base",
    "reinforce.max_tokens=8",
    "hardware.gpu=cpu",
    "layout.nodes=1",
)


def reinforced(gang, hosts: Hosts, *overrides: str) -> Controlled:
    """A reinforcement learning whose first host trains and two others answer prompts, where nothing else is said."""
    given = dict(one.split("=", 1) for one in (*REINFORCED, "reinforce.hosts=2", *overrides))
    one = gang(hosts, *(f"{key}={value}" for key, value in given.items()))
    one.run = one.run.model_copy(update={"paths": one.run.paths.model_copy(update={"reinforced": hosts.output})})
    one.job = partial(job_of, "reinforce")
    return one


@pytest.mark.parametrize(
    ("act", "said"), [("die", "b no longer answers"), ("fail", "b has ended"), ("told", "b has ended")]
)
def test_a_host_that_answers_prompts_is_left_out_where_it_is_lost(gang, act, said, monkeypatch):
    """Messages are read later than the engine reports the end of their sender."""
    read = Lookout._read_member
    monkeypatch.setattr(Lookout, "_read_member", lambda *of: (time.sleep(0.1), read(*of)))
    hosts = Hosts(["a", "b", "c"], {"b": [act], "c": ["compute"]})
    one = reinforced(gang, hosts)
    running = one.start()
    wait_for(lambda: any(line.startswith(said) for line in one.lines), 30)
    assert hosts.saved == []  # nobody is told to end
    hosts.trained.set()
    running.join(30)
    assert one.error is None and hosts.given == [["a", "b", "c"]]
    assert [line for line in one.lines if "continue without it" in line] == [f"{said}; the others continue without it"]
    assert any(line.startswith("attempt 1: a, b, c reinforce; ") for line in one.lines)


def test_the_host_that_trains_costs_the_attempt_and_the_next_one_has_as_many_again(gang):
    acts = {"a": ["die"], "b": ["compute", "answer"], "c": ["compute"] * 2, "d": ["compute"]}
    hosts = Hosts([*acts], acts)
    one = reinforced(gang, hosts)
    one.ends_well()
    assert hosts.given == [["a", "b", "c"], ["b", "c", "d"]]
    assert "host: a no longer answers; continues without a" in one.lines


def test_a_reinforcement_learning_is_a_gang_where_vllm_has_hosts_of_its_own(gang):
    one = reinforced(gang, Hosts(["a", "b", "c"]), "layout.gpus_per_node=2", "layout.pp=2", "reinforce.engines=2")
    job = job_of("reinforce", one.run)
    assert job and job.conf(job.run) == one.run and job.run.layout.nodes == 3
    assert job.task(job.run) == Task(
        "reinforce", nodes=1, gpus=2, ranks=2, helps="reinforcement.engines.guest", helpers=2
    )
    alone = one.run.model_copy(update={"reinforce": one.run.reinforce.model_copy(update={"hosts": 0})})
    assert job_of("reinforce", alone) is None


def test_a_reinforcement_learning_over_several_hosts_is_a_gang_with_and_without_hosts_of_vllm(gang):
    one = reinforced(gang, Hosts(["a"]), "layout.nodes=2")
    job = job_of("reinforce", one.run)
    assert job and job.run.layout.nodes == 4 and job.needed(job.run) == 2
    assert job.task(job.run) == Task(
        "reinforce", nodes=2, gpus=1, ranks=1, helps="reinforcement.engines.guest", helpers=1
    )
    assert job.is_over(job.run, ["done", "done", "running", "failed"])
    assert not job.is_over(job.run, ["done", "running", "done", "done"])
    alone = one.run.model_copy(update={"reinforce": one.run.reinforce.model_copy(update={"hosts": 0})})
    job = job_of("reinforce", alone)
    assert job and job.task(job.run) == Task("reinforce", nodes=2, gpus=1, ranks=1)


def test_vllm_goes_without_hosts_before_training_does_and_keeps_one(gang):
    one = reinforced(gang, Hosts(["a"]), "layout.nodes=2", "reinforce.hosts=3")
    job = job_of("reinforce", one.run)
    assert job

    def on(hosts: int) -> tuple[int, int]:
        layout = job.run.layout.model_copy(update={"nodes": hosts})
        found = job.conf(job.run.model_copy(update={"layout": layout}))
        return found.layout.nodes, found.reinforce.hosts

    assert [on(hosts) for hosts in (5, 4, 3, 2)] == [(2, 3), (2, 2), (2, 1), (1, 1)]


def test_min_nodes_counts_the_hosts_that_train(gang):
    run = reinforced(gang, Hosts(["a"]), "layout.nodes=2").run

    def found(left: int, min_nodes: int | None) -> int | None:
        job = job_of("reinforce", run.changed(gang={"min_nodes": min_nodes}))
        assert job
        smaller = next_step.fewer(job.run, left, fewer_hosts(job.run, job.trains))
        return smaller and smaller.layout.nodes

    assert (found(3, 2), found(2, 2), found(2, 1), found(1, 1), found(3, None)) == (3, None, 2, None, None)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_host_that_trains_costs_the_attempt_whichever_it_is(gang, lost):
    acts = {name: ["compute", "answer"] for name in "abc"} | {name: ["compute"] * 2 for name in "de"}
    hosts = Hosts([*acts], acts | {lost: ["die"]})
    one = reinforced(gang, hosts, "layout.nodes=2")
    one.ends_well()
    assert hosts.given == [["a", "b", "c", "d"], [name for name in "abcde" if name != lost]]
    assert f"host: {lost} no longer answers; continues without {lost}" in one.lines


def test_fewer_hosts_are_gone_on_with_where_min_nodes_allows_it_for_those_that_train(gang):
    acts = {"a": ["compute", "compute", "answer"], "b": ["compute", "die"], "c": ["die"], "d": ["compute"] * 3}
    hosts = Hosts([*acts], acts)
    one = reinforced(gang, hosts, "layout.nodes=3", "reinforce.hosts=1", "gang.min_nodes=1", "reinforce.prompts=12")
    one.ends_well()
    assert hosts.given == [["a", "b", "c", "d"], ["a", "b", "d"], ["a", "d"]]
    assert "host: c no longer answers; continues with 3 of 4 hosts, without c" in one.lines
    confs = [yaml.safe_load(Board(one.store, "gang", number).text("resolved.yaml")) for number in (1, 2, 3)]
    assert [(run["layout"]["nodes"], run["reinforce"]["hosts"]) for run in confs] == [(3, 1), (2, 1), (1, 1)]


def test_a_conversion_is_a_gang_where_all_hosts_are_to_convert(gang, tmp_path):
    run = gang(Hosts(["a", "b"]), "layout.nodes=2").run
    assert job_of("convert", run) is None
    over_all = run.model_copy(update={"convert": run.convert.model_copy(update={"hosts": "all"})})
    job = job_of("convert", over_all)
    assert job and job.task(over_all) == Task("convert", nodes=2, gpus=0, ranks=over_all.layout.gpus_per_node)
    paths = over_all.paths.model_copy(update={"base": str(tmp_path / "base")})
    job = replace(job, run=over_all.model_copy(update={"paths": paths}))
    assert (job.newest(), job.is_done()) == (0, False)
    one_host = over_all.model_copy(update={"layout": over_all.layout.model_copy(update={"nodes": 1})})
    assert job_of("convert", one_host) is None and takes(one_host, "convert").gpus == 0
    (tmp_path / "base.partial/unfinished").mkdir(parents=True)
    for name in ("0.json", "1.json", "what.txt"):
        (tmp_path / "base.partial/unfinished" / name).touch()
    assert job.newest() == 2
    (tmp_path / "base").mkdir()
    checkpoints.mark(tmp_path / "base")
    assert job.is_done() and job.is_over(job.run, ["done", "done"]) and not job.is_over(job.run, ["done", "running"])


def test_ranks_follow_the_places_of_hosts_and_the_first_host_is_the_master(gang):
    hosts = Hosts(["n1", "n2", "n10"], places={"n1": "rack2", "n2": "rack1", "n10": "rack1"})
    hosts.trained.set()
    one = gang(hosts)
    one.ends_well()
    word = hosts.words["n1 1"]
    assert (word.order, word.master) == ((1, 2, 0), ("n2", 2))
    assert any(line.startswith("attempt 1: n2, n10, n1 train;") for line in one.lines)


def test_cancelled_all_save_and_end(gang):
    hosts = Hosts(["a", "b"])
    one = gang(hosts)
    running = one.start()
    wait_for(lambda: len(hosts.words) == 2, 20)
    one.cancelled.set()
    running.join(20)
    assert isinstance(one.error, Stopped)
    assert sorted(hosts.saved) == ["a", "b"] and sorted(hosts.over) == ["a 1", "b 1"]


def test_where_one_host_is_told_to_end_all_save(gang):
    hosts = Hosts(["a", "b", "c"], {"b": ["told"]})
    one = gang(hosts)
    running = one.start()
    wait_for(lambda: len(hosts.saved) == 3, 20)
    hosts.trained.set()
    running.join(20)
    assert one.error is None
    assert "preempted: b was ended by a signal; begins again" in one.lines
