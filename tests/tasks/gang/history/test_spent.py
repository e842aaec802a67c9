"""Every second of a training has a category, whatever befell its attempts."""

import json

import pytest

from contract import signs_of_life
from tasks.gang.history import spent
from tasks.gang.history.timeline import DONE, Attempt, History, Host, Teller, attempts

HOSTS = (Host("a", "", 0, 0, 2), Host("b", "", 1, 2, 2))


def lines(
    start: int, began: float, *steps: tuple[int, float], attempt: int | None = None, saved: int = 0
) -> list[dict]:
    """The journal of a start: 2 s of starting, 3 s of loading, and steps of a second, the last of some with a save."""
    first = {"time": began + 2, "step": start, "start": start, "seconds": {"starting": 2.0}}
    found, at = [first | ({"attempt": attempt} if attempt else {})], began + 5
    for step, seconds in steps:
        at += seconds
        found.append({"time": at, "step": step, "seconds": {"loading": 3.0 * (len(found) == 1), "training": seconds}})
        if step == saved:
            at += 0.5
            found.append({"time": at, "step": step, "saved": True, "seconds": {"saving": 0.5}})
    return found


def whole(seconds: dict[str, float]) -> float:
    return sum(seconds.values())


def test_lost_are_steps_after_the_checkpoint_and_repeated_those_done_again():
    killed = Attempt(1, 100.0, HOSTS, 0, 3, ended=115.0, how="rank 1 died", joined=104.0)
    done = Attempt(2, 120.0, HOSTS, 2, 4, ended=132.0, how=DONE, joined=121.0)
    starts = [lines(0, 105, (1, 1.0), (2, 1.0), (3, 1.0), saved=2), lines(2, 121, (3, 1.0), (4, 2.0), saved=4)]
    found = spent.of([killed, done], starts, 4).seconds
    assert whole(found) == pytest.approx(32.0)
    assert found["waiting"] == pytest.approx(5.0)
    assert found["starting"] == pytest.approx(5.0)  # a second from the hosts to the first process
    assert found["loading"] == pytest.approx(6.0)
    assert found["training"] == pytest.approx(4.0) and found["repeated"] == pytest.approx(1.0)
    assert found["lost"] == pytest.approx(2.5)  # step 3 and the next until its end was noticed
    assert found["saving"] == pytest.approx(1.0)
    assert found["idle"] == pytest.approx(7.5)  # 5 between the attempts, the rest after the last step
    assert spent.text(found).startswith("15.6% effective: idle 23.4%, loading 18.8%")


def test_attempts_of_a_gang_have_their_own_lines_and_gpus():
    """Its journal has numbers of attempts, as clocks of hosts differ."""
    short = Attempt(1, 0.0, HOSTS[:1], 0, 1, ended=10.0, how="host b is gone", joined=1.0)
    none = Attempt(2, 10.0, (), ended=14.0, how="1 of 2 hosts joined")
    last = Attempt(3, 14.0, HOSTS, 0, 1, ended=24.0, how=DONE, joined=15.0)
    late = 1000.0  # seconds by which the clock of rank 0 is ahead
    starts = [lines(0, late + 2, (1, 2.0), attempt=1), lines(0, late + 16, (1, 2.0), attempt=3)]
    found = spent.of([short, none, last], starts, 4)
    assert whole(found.seconds) == pytest.approx(24.0)
    assert found.seconds["waiting"] == pytest.approx(6.0)
    assert found.seconds["lost"] + found.seconds["starting"] + found.seconds["loading"] > 9
    assert found.seconds["repeated"] == pytest.approx(2.0) and found.seconds["training"] == 0
    assert found.gpu_seconds["repeated"] == pytest.approx(8.0)
    assert whole(found.gpu_seconds) == pytest.approx(10 * 2 + 14 * 4)


def test_a_flow_that_died_leaves_idle_time_and_a_running_attempt_is_still_training():
    died = Attempt(1, 0.0, HOSTS, joined=1.0)
    running = Attempt(2, 100.0, HOSTS, joined=101.0)
    starts = [lines(0, 1, (1, 1.0), (2, 1.0), saved=1), lines(1, 101, (2, 1.0))]
    found = spent.of([died, running], starts, 4).seconds
    assert found["lost"] == pytest.approx(1.0) and found["repeated"] == pytest.approx(1.0)
    assert found["idle"] == pytest.approx(100 - 8.5)


def test_a_journal_with_a_line_cut_off_is_read_and_attempts_are_kept(tmp_path):
    starts = lines(0, 105, (1, 1.0))
    text = "\n".join(map(json.dumps, starts)) + '\n{"time": 1'
    (tmp_path / signs_of_life.JOURNAL).write_text(text)
    assert spent.read(tmp_path) == [starts] and spent.read(tmp_path / "none") == []
    for flow in ("first", "second"):
        teller = Teller(History("gang", "tiny", flow), tmp_path / "metrics.jsonl", work=tmp_path)
        teller.begins(1 + len(attempts(tmp_path)))
        teller.joins(HOSTS)
        teller.ends(DONE)
    assert [attempt.number for attempt in attempts(tmp_path)] == [1, 2]
