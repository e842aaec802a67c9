"""tasks/gang/diagnosis/next_step.py, by histories of attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.load import load
from conf.planner.fewer_hosts import fewer_hosts
from tasks.gang.diagnosis.classify import Failure
from tasks.gang.diagnosis.next_step import FRUITLESS, LONGEST_WAIT, Attempt, decide, is_quick
from tasks.gang.engines import spared

HOSTS = ("a", "b", "c", "d")
GLM = load("glm47")


def fits(min_nodes):
    """The callable for this gang.min_nodes."""
    return fewer_hosts(load("glm47", [f"gang.min_nodes={min_nodes}"]))


def attempt(kind, host="", step=5, checkpoint=0, retry=True, blamed=()):
    return Attempt(Failure(kind, f"{kind}: {host}", retry, host, None, step, blamed), checkpoint)


@pytest.mark.parametrize("kind", ["user", "memory", "data"])
def test_what_would_fail_again_is_not_tried_again(kind):
    decision = decide([attempt(kind, "a", retry=False)], GLM, retries=3)
    assert (decision.action, decision.line) == ("stop", f"{kind}: a")


def test_a_process_that_died_once_is_started_again_on_the_same_hosts():
    decision = decide([attempt("host", "b", checkpoint=4)], GLM, retries=3)
    assert (decision.action, decision.without, decision.nodes, decision.wait) == ("retry", (), 4, 0)
    assert decision.line == "resumes from step 4"


def test_hosts_continue_at_once_only_after_the_first_failure_of_an_attempt_that_trained():
    killed = attempt("host", "b", step=5, checkpoint=4)
    assert is_quick([killed])
    assert is_quick([killed, attempt("unknown", "a", step=11, checkpoint=10)])
    assert not is_quick([killed, attempt("host", "a", step=6, checkpoint=4)])  # no checkpoint between them
    assert not is_quick([killed, attempt("host", "a", step=4, checkpoint=10)])  # it made no step
    assert is_quick([attempt("hang", "b", step=5, checkpoint=4)])
    for other in ("network", "storage", "preempted"):
        assert not is_quick([attempt(other, "b", step=5, checkpoint=4)])
    assert not is_quick([attempt("host", "b", step=5, retry=False)])


def test_retries_are_bounded_and_counted_from_the_last_progress():
    same = [attempt("network", step=n) for n in range(4)]
    assert decide(same[:3], GLM, retries=3).action == "retry"
    assert decide(same, GLM, retries=3).action == "stop"
    further = [*same[:3], attempt("network", checkpoint=10), attempt("network", checkpoint=20)]
    assert decide(further, GLM, retries=1).action == "retry"
    assert decide([*further, attempt("network", checkpoint=20)], GLM, retries=1).action == "stop"
    assert decide(same[:1], GLM, retries=0).action == "stop"


def test_a_broken_host_is_left_out_at_once_a_suspect_the_second_time():
    broken = decide([attempt("host", "b", blamed=("b",))], GLM, retries=3)
    assert (broken.action, broken.without, broken.nodes) == ("retry without", ("b",), 4)
    suspect = [attempt("hang", "c"), attempt("network", "c")]
    assert decide(suspect[:1], GLM, retries=3).action == "retry"
    assert decide(suspect, GLM, retries=3).without == ("c",)
    gone = [attempt("host", "b", blamed=("b",)), attempt("host", "d", blamed=("d",))]
    assert decide(gone, GLM, retries=3).without == ("d", "b")


def test_of_hosts_left_out_the_first_to_have_failed_takes_part_again_first():
    there = {"a", "b", "c", "d"}
    for needed, out in [(2, ("d", "b")), (3, ("d",)), (4, ()), (5, ())]:
        assert spared(("d", "b"), lambda out, needed=needed: len(there - {*out}) >= needed) == out


def test_fewer_hosts_only_where_allowed_and_legal():
    history = [attempt("host", "b", blamed=("b",))]
    # 3 hosts: dp 12 does not divide a global batch of 16; 2 hosts: dp 8 does
    decision = decide(history, GLM, retries=3, available=4, fits=fits(1))
    assert (decision.action, decision.nodes, decision.without) == ("fewer", 2, ("b",))
    assert "2 of 4 hosts, without b" in decision.line
    assert decide(history, GLM, retries=3, available=4, fits=fits(3)).action == "retry without"
    assert decide(history, GLM, retries=3, available=4, fits=fits("null")).action == "retry without"
    assert decide(history, GLM, retries=3, available=5, fits=fits(1)).nodes == 4


def test_once_there_are_enough_hosts_all_are_taken_again():
    history = [attempt("host", "b", blamed=("b",)), attempt("network", checkpoint=9)]
    assert decide(history, GLM, retries=3, available=4, fits=fits(1)).nodes == 2
    decision = decide(history, GLM, retries=3, available=5, fits=fits(1))
    assert (decision.action, decision.nodes, decision.without) == ("retry without", 4, ("b",))


def test_preemption_does_not_count_until_it_is_all_that_happens():
    taken = [attempt("preempted")] * (FRUITLESS - 1)
    assert decide(taken, GLM, retries=0).action == "retry"
    assert decide([*taken, attempt("preempted")], GLM, retries=3).action == "stop"
    assert decide([*taken, attempt("preempted", checkpoint=5)], GLM, retries=0).action == "retry"


def test_the_same_step_on_other_hosts_is_no_hosts_fault():
    same = [attempt("unknown", "a", step=7), attempt("unknown", "b", step=7)]
    decision = decide(same, GLM, retries=9)
    assert decision.action == "stop" and "twice at step 7" in decision.line
    assert decide([same[0], attempt("unknown", "b", step=8)], GLM, retries=9).action == "retry"
    assert decide([same[0], same[0]], GLM, retries=9).action == "retry"


def test_services_are_given_time():
    outage = [attempt("storage", step=n) for n in range(9)]
    waits = [decide(outage[:n], GLM, retries=9).wait for n in range(1, 9)]
    assert waits[:4] == [5, 10, 20, 40] and max(waits) == LONGEST_WAIT
    assert decide([attempt("host", "b")], GLM, retries=3).wait == 0


ONE = fits(1)
KINDS = ("host", "network", "storage", "preempted", "hang", "unknown")


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(HOSTS), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 5),
)
def test_no_history_is_retried_for_ever(events, retries):
    """Without a newer checkpoint, retries plus the preemptions bound the attempts."""
    history: list[Attempt] = []
    for kind, host, step, blamed in events:
        history.append(attempt(kind, host, step, 0, True, (host,) if blamed else ()))
        decision = decide(history, GLM, retries, available=4, fits=ONE)
        if decision.action == "stop":
            break
    else:
        assert len(history) < retries + 1 + FRUITLESS
    assert len(history) <= retries + FRUITLESS + 1
