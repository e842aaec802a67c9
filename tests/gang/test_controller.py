"""The controller with an engine and members that are threads, all times divided by FASTER: nobody trains."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conf.load import load
from conf.schema import Run
from tasks.gang import controller
from tasks.gang.board import Board
from tasks.gang.link import Link
from tasks.launch import Broken
from tasks.store import Store, open_store
from tests.gang.compete import CONF, TIMES, Mortal

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
    acts: dict[str, list[str]] = field(default_factory=dict)  # train, die, fail, silent for a while, never come
    places: dict[str, str] = field(default_factory=dict)
    given: list[list[str]] = field(default_factory=list)  # of each attempt, by member
    words: list[dict] = field(default_factory=list)  # the controller's, as members saw it when they went
    busy: set[str] = field(default_factory=set)
    trained: threading.Event = field(default_factory=threading.Event)  # members end their training then
    over: list[str] = field(default_factory=list)

    def turn(self, run: Run) -> str | None:
        return "hosts"

    def capacity(self, run: Run, without: tuple[str, ...] = ()) -> str | None:
        free = [name for name in self.names if name not in self.busy and name not in without]
        return None if len(free) >= run.layout.nodes else f"{run.layout.nodes}, where {len(free)} are free"

    def available(self, run: Run, without: tuple[str, ...] = ()) -> int | None:
        return sum(name not in without for name in self.names)

    def start(self, run: Run, board: Board, n: int, without: tuple[str, ...] = ()) -> "Handle":
        free = [name for name in self.names if name not in self.busy]
        chosen = sorted(free, key=lambda name: name in without)[:n]
        self.given.append(chosen)
        threads = []
        for node, host in enumerate(chosen):
            self.busy.add(host)
            threads.append(threading.Thread(target=self.be, args=(host, node, board, run), daemon=True))
            threads[-1].start()
        return Handle(threads)

    def be(self, host: str, node: int, board: Board, run: Run) -> None:
        act = (self.acts.get(host) or ["train"]).pop(0) if self.acts.get(host) else "train"
        try:
            if act != "never":
                self.member(host, node, board, run, act)
        finally:
            self.over.append(f"{host} {board.attempt}")
            self.busy.discard(host)

    def member(self, host: str, node: int, board: Board, run: Run, act: str) -> None:
        found = board.pulse()
        assert found
        store = Mortal(board.store, host)
        me = {"by": f"{host} {board.attempt}", "host": host, "state": "waiting", "address": host, "port": 1}
        me |= {"master_port": 2, "probe": Path(found[0]["probe"]).read_text(), "place": self.places.get(host, "")}
        one = Link(Board(store, board.gang, board.attempt), node, me)  # type: ignore[arg-type]
        if not one.join():
            return
        went = False
        while not (why := one.why_stop()):
            time.sleep(0.01)
            if one.word["state"] != "go":
                continue
            if not went:
                went = True
                self.words.append(one.word)
                one.say(state="running")
            if act == "die":
                store.dead.set()
                one.end(0)
                return
            if act == "fail":
                break
            if act == "silent":
                act = "train"
                store.dead.set()
                time.sleep(8 / FASTER)
                store.dead.clear()
            if act == "train" and self.trained.is_set():
                mark(run)
                one.say(state="done", over=True)
                one.end(5)
                return
        if why:
            one.say(state="stopped", reason=why, over=True)
        else:
            told = {"rank": node, "code": 1, "step": 0, "silent": False, "state": "", "stalled": False}
            one.say(state="failed", failed=[told | {"lines": [f"RuntimeError: of {host}"]}], over=True)
        one.end(5)


@dataclass
class Handle:
    threads: list[threading.Thread]

    def alive(self) -> dict[int, bool | None]:
        return {}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        for thread in self.threads:
            thread.join(10)


def mark(run: Run) -> None:
    """All steps are made, and in a checkpoint."""
    path = Path(run.paths.output) / f"checkpoints/iter_{STEPS:07d}/complete.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"files": {}}))


@dataclass
class Gang:
    """A controller under way, in a thread."""

    run: Run
    folder: Path
    store: Store
    lines: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    tick: object = staticmethod(lambda: None)

    def train(self) -> None:
        try:
            controller.train(
                self.run, self.folder, self.store, "gang", self.lines.append, self.cancelled.is_set, self.tick
            )
        except BaseException as error:
            self.error = error

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.train, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def gang(tmp_path, monkeypatch):
    """gang(hosts, overrides) -> a controller that is to be started."""

    def gang(hosts: Hosts, *overrides: str) -> Gang:
        monkeypatch.setattr(controller, "engine_of", lambda run: hosts)
        conf = tmp_path / "gang.yaml"
        conf.write_text(CONF.format(name="gang", nodes=len(hosts.names), folder=tmp_path))
        run = load(conf, list(overrides))
        run = run.model_copy(update={"gang": run.gang.model_copy(update={"silent_after": 12 / FASTER})})
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        return Gang(run, folder, open_store(str(tmp_path / "store")))

    return gang


def wait_for(so, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_shows_progress_may_hang_and_a_dead_host_is_noticed_all_the_same(gang):
    hosts, hangs = Hosts(["a", "b"], {"b": ["die"]}), threading.Event()
    one = gang(hosts, "gang.retries=0")
    one.tick = lambda: hangs.wait(60)
    running, began = one.start(), time.monotonic()
    running.join(30)
    hangs.set()
    assert isinstance(one.error, Broken) and "b no longer answers" in str(one.error)
    assert time.monotonic() - began < 15
