"""What the controller tells of its attempts: the history in the store, Prefect's page, MLflow's tags."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.gang.history import prefect_page, timeline
from tasks.gang.history.timeline import History, Teller, read, settled, state
from tasks.gang.messages import Member
from tasks.run.task_artifact import TaskArtifact
from tasks.store import open_store
from tests.tasks.gang.conftest import wait_for

NAMES = {0: "n1", 2: "n2"}
NODES = {k: Member("x", f"host{k}", "running", f"10.0.0.{k + 1}") for k in (0, 2)}
KILLED = "host: rank 3 on n2 after step 14: killed by SIGKILL"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def teller(tmp_path) -> Teller:
    return Teller(History("train-0123", "tiny", "tiny-1"), tmp_path / "metrics.jsonl")


def step(teller: Teller, number: int) -> None:
    with teller.metrics.open("a") as file:
        file.write(json.dumps({"kind": "train", "step": number}) + "\n")


def two_attempts(teller: Teller) -> History:
    teller.begins(1)
    teller.trains(NAMES, NODES, 2, 0)
    step(teller, 14)
    teller.ends(KILLED)
    teller.follows(f"{KILLED}; resumes from step 10")
    teller.begins(2)
    return teller.history


def test_what_an_attempt_did(teller):
    two_attempts(teller)
    first, second = teller.history.attempts
    assert [(host.name, host.member, host.first, host.ranks) for host in first.hosts] == [
        ("n1", 0, 0, 2),
        ("n2", 2, 2, 2),
    ]
    assert (first.start, first.reached, first.how, first.next) == (0, 14, KILLED, "resumes from step 10")
    assert first.ended >= first.began and second.ended is None
    assert state(teller.history) == "attempt 2 waits for its hosts"
    teller.trains(NAMES, NODES, 2, 10)
    assert state(teller.history) == "attempt 2 trains on 2 hosts"
    teller.ends("storage: full")  # before any step: what the last one wrote down is not this one's
    assert (teller.history.attempts[1].start, teller.history.attempts[1].reached) == (10, 10)
    assert teller.history.failure == "storage: full"


def test_how_it_all_ends(teller):
    two_attempts(teller)
    with teller.over():
        teller.ends("done")
    assert state(teller.history) == "done" and teller.history.failure == KILLED
    with pytest.raises(RuntimeError), teller.over():
        raise RuntimeError("memory: full")
    assert state(teller.history) == "ended: memory: full"


def test_the_page_has_hosts_attempts_and_commands(teller, store):
    text = prefect_page.page(two_attempts(teller), store)
    assert "| `n2` | `10.0.0.3` | 2 to 3 |" in text
    assert "| 0 to 14 | 2 |\n" in text
    assert f"\n- attempt 1: {KILLED}\n    - then: resumes from step 10\n" in text
    assert text.index("\n| 2 | ") < text.index("\n| 1 | ")  # the newest first
    assert "python -m flows.logs train-0123 --follow\n" in text
    assert "python -m flows.logs train-0123 --attempt 1 --rank 3 --err\n" in text
    assert store.link("gangs/train-0123") in text


@pytest.mark.parametrize(
    "how, options",
    [
        ("hang: rank 17 on n2: stopped (SIGSTOP or a debugger)", " --rank 17 --err"),
        ("host: n2 no longer answers", " --host n2 --err"),
        ("hang: no rank completes a step after 12", " --err"),
    ],
)
def test_whose_log_is_worth_reading(how, options, teller, store):
    teller.begins(1)
    teller.trains(NAMES, NODES, 2, 0)
    teller.ends(how)
    assert f" --attempt 1{options}\n" in prefect_page.page(teller.history, store)


def test_nothing_that_a_log_says_means_anything_on_the_page(teller, store):
    teller.begins(1)
    teller.ends("user: | <img src=x> [a](http://b) `c`\nsecond line")
    line = next(
        line for line in prefect_page.page(teller.history, store).splitlines() if line.startswith("- attempt 1: ")
    )
    assert line == r"- attempt 1: user: \| \<img src=x\> \[a\](http://b) \`c\` second line"


def test_a_large_gang_s_page_stays_small(teller, store):
    names = {k: f"node{k}" for k in range(1000)}
    for number in range(1, 1 + timeline.KEPT + 5):
        teller.begins(number)
    teller.trains(names, dict.fromkeys(names, NODES[0]), 8, 0)
    assert len(teller.history.attempts) == timeline.KEPT
    text = prefect_page.page(teller.history, store)
    assert len(text) < 10_000 and "and 950 more" in text and f"## Attempts: {timeline.KEPT + 5}" in text


def test_another_flow_goes_on_with_the_history(teller, store):
    timeline.write(store, two_attempts(teller))
    earlier = read(store, "train-0123")
    later = Teller(History("train-0123", "tiny", "tiny-2"), teller.metrics)
    for number in (3, 4):
        later.begins(number)
        timeline.write(store, later.history.after(earlier))
    told = read(store, "train-0123")
    assert told and [one.number for one in told.attempts] == [1, 2, 3, 4] and told.flow == "tiny-2"
    assert settled(told)[1].how == "its flow ended without a report" and settled(told)[3].ended is None
    assert "its flow ended without a report" in prefect_page.page(told, store)
    assert [one.gang for one in timeline.every(store)] == ["train-0123"]


def test_a_server_that_hangs_delays_neither_training_nor_history(teller, store, monkeypatch):
    hangs, asked = threading.Event(), threading.Event()

    def show(*_):
        asked.set()
        hangs.wait(30)

    monkeypatch.setattr(prefect_page, "TaskArtifact", lambda *_: SimpleNamespace(send=show))
    monkeypatch.setattr(prefect_page, "LAST_WORDS", 0.3)
    tags: dict = {}
    tracked: Any = SimpleNamespace(tags=tags.update)
    began, history = time.monotonic(), History("train-0123", "tiny", "tiny-1")
    with prefect_page.reporting(history, teller.metrics, store, tracked, "gang-tiny") as told:
        told.begins(1)
        assert asked.wait(10)
        told.ends(KILLED)
        wait_for(lambda: (kept := read(store, "train-0123")) and kept.attempts[0].how == KILLED)
    assert time.monotonic() - began < 10
    wait_for(lambda: read(store, "train-0123").end == "done")
    assert tags["finetune.gang.last_failure"] == KILLED
    hangs.set()


def test_the_report_has_a_line(teller):
    line = prefect_page.brief(two_attempts(teller))
    assert line.startswith(
        "Gang: attempt 2 waits for its hosts, on 2 hosts, in 2 attempts; the last failure was host: "
    )
    assert line.endswith(f"{KILLED}. `python -m flows.logs train-0123`")


def test_a_damaged_history_is_none(store):
    for content in (b"", b"{}", b"[]", b'{"attempts": 7}'):
        store.write("gangs/history/train-0123.json", content)
        assert read(store, "train-0123") is None and timeline.every(store) == []


def test_mlflow_gets_hosts_attempts_and_the_last_failure(teller):
    tags: dict = {}
    prefect_page.tag(SimpleNamespace(tags=tags.update), two_attempts(teller))
    assert tags == {
        "finetune.gang": "train-0123",
        "finetune.gang.hosts": "n1, n2",
        "finetune.gang.attempts": 2,
        "finetune.gang.last_failure": KILLED,
    }


def test_without_a_task_of_prefect_s_there_is_no_page():
    artifact = TaskArtifact("gang-tiny", "markdown")
    artifact.send("text", "line")
    assert not artifact.is_sent
