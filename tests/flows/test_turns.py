"""The order of a flow's stages, and what becomes of it when one crashes; toys in place of the trainer's commands."""

import signal
import subprocess
import sys
import time

import pytest

from tests.conf.host.test_gpu_locks import fake_nvidia_smi, show_gpus
from tests.support.flow_world import ROOT, states, wait_for
from tests.support.toy_flows import LONG, Toys


@pytest.fixture
def gpu(toys):
    """On a host with one."""
    fake_nvidia_smi(toys.folder, toys.environment.__setitem__)
    show_gpus(toys.folder, {"GPU-a": 4})
    return toys


def test_on_a_gpu_no_two_stages_run_at_once_and_the_base_is_evaluated_before_training(gpu):
    output = gpu.run("one")
    assert set(states(output).values()) == {"Completed"} and gpu.together() == set()
    spans = gpu.spans()
    assert spans["evaluate-base"][0][1] < spans["train"][0][0]


@pytest.mark.slow
def test_where_there_is_room_for_both_the_base_is_evaluated_beside_training(gpu):
    show_gpus(gpu.folder, {"GPU-a": 4, "GPU-b": 4})
    flow = gpu.start("one", "evaluate.gpus=1", evaluate_base="slow")
    wait_for(lambda: gpu.begun("export"), LONG)
    (gpu.folder / "go").touch()
    assert flow.wait(LONG) == 0
    assert set(states(gpu.said("one")).values()) == {"Completed"} and ("evaluate-base", "train") in gpu.together()
    assert "waits for" not in gpu.said("one")


@pytest.mark.slow
def test_without_a_gpu_training_does_not_wait_for_the_evaluation_of_the_base(toys):
    flow = toys.start("one", evaluate_base="slow")
    wait_for(lambda: toys.begun("export"), LONG)
    (toys.folder / "go").touch()
    assert flow.wait(LONG) == 0
    assert set(states(toys.said("one")).values()) == {"Completed"}


@pytest.mark.slow
def test_two_flows_on_one_host_take_turns_and_say_for_whom_they_wait(gpu):
    first = gpu.start("one", "--until", "evaluate-base", evaluate_base="slow")
    wait_for(lambda: gpu.begun("evaluate-base"), LONG)
    second = gpu.start("two", "optimizer.lr=1e-3")
    wait_for(lambda: "waits for 1 GPU: " in gpu.said("two"), LONG)
    assert len(gpu.spans()["evaluate-base"]) == 1 and second.poll() is None
    (gpu.folder / "go").touch()
    assert [first.wait(LONG), second.wait(LONG)] == [0, 0]
    whom = f"evaluate-base of {gpu.place.name_of(gpu.said('one'))}"
    assert f"waits for 1 GPU: {whom} has held it for" in gpu.said("two")
    assert gpu.together() == set() and set(states(gpu.said("two")).values()) == {"Completed"}


@pytest.mark.slow
def test_a_flow_that_waits_is_cancelled_at_once_and_one_that_is_killed_gives_its_hold_up(gpu):
    first = gpu.start("one", "--until", "evaluate-base", evaluate_base="slow")
    wait_for(lambda: gpu.begun("evaluate-base"), LONG)
    second = gpu.start("two", "--until", "evaluate-base")
    wait_for(lambda: "waits for 1 GPU: " in gpu.said("two"), LONG)
    told = time.monotonic()
    second.send_signal(signal.SIGINT)
    second.wait(60)
    assert time.monotonic() - told < 10 and len(gpu.spans()["evaluate-base"]) == 1  # the first flow's own
    first.kill()
    first.wait(LONG)
    third = gpu.run("three", "--until", "evaluate-base")
    assert states(third)["evaluate-base"] == "Completed"


@pytest.mark.parametrize(
    "fate, code, state", [("crash", 1, "Crashed"), pytest.param("fault", 2, "Failed", marks=pytest.mark.slow)]
)
def test_a_base_that_cannot_be_evaluated_ends_the_run_before_training(gpu, fate, code, state):
    output = gpu.run("one", code=code, evaluate_base=fate)
    found = states(output)
    assert (found["evaluate-base"], found["train"]) == (state, "NotRun") and not gpu.begun("train")
    assert len(gpu.spans()["evaluate-base"]) == 1, "what crashes in native code is not tried again"
    assert "error: train: not started: evaluate-base failed; evaluate.base=optional trains" in output
    if fate == "crash":
        error = output[output.index("error: evaluate-base: ") :].splitlines()
        assert "failed with code 139 (Segmentation fault); vLLM does not serve this model here" in error[0]
        assert error[2] == "error: ERROR head_dim 24 is not supported"
    found = gpu.mlflow(gpu.place.name_of(output))
    reason = {"crash": "code 139", "fault": "evaluate.toy: wrong"}[fate]
    for stage in ("evaluate-base", ""):
        assert found[stage][0] == "FAILED" and reason in found[stage][1]
    assert {status for status, _ in found.values()} == {"FINISHED", "FAILED"}


@pytest.mark.slow
def test_a_key_lets_it_train_all_the_same_and_nothing_is_promoted(gpu):
    output = gpu.run("one", "evaluate.base=optional", code=1, evaluate_base="crash")
    found = states(output)
    assert found == {
        **dict.fromkeys(("download", "prepare", "convert", "train", "export", "evaluate-tuned"), "Completed"),
        "evaluate-base": "Crashed",
        "promote": "NotRun",
    }
    assert gpu.together() == set()


@pytest.mark.slow
def test_without_a_gpu_training_beside_it_is_stopped(toys):
    output = toys.run("one", code=1, train="slow", evaluate_base="late-crash")
    assert states(output)["train"] == "Failed"
    assert "error: train: stopped: evaluate-base failed; evaluate.base=optional" in output


def test_every_run_in_mlflow_ends_when_the_flow_is_cancelled(toys):
    flow = toys.start("one", evaluate_base="slow", train="slow")
    wait_for(lambda: toys.begun("train"), LONG)
    name = wait_for(lambda: _tracked(toys, "one"), LONG)
    flow.send_signal(signal.SIGTERM)
    flow.wait(60)
    ended = wait_for(lambda: _all_ended(toys, name), LONG)
    assert ended["train"][0] == ended["evaluate-base"][0] == ended[""][0] == "KILLED"
    assert ended["train"][1] and ended[""][1]


@pytest.mark.slow
def test_every_run_in_mlflow_ends_after_a_flow_that_was_killed(toys):
    flow = toys.start("one", evaluate_base="slow", train="slow")
    wait_for(lambda: toys.begun("train"), LONG)
    name = wait_for(lambda: _tracked(toys, "one"), LONG)
    flow.kill()
    flow.wait(LONG)
    command = [sys.executable, "-m", "tasks.tracking", str(toys.folder / "one")]
    subprocess.run(command, cwd=ROOT, env=toys.place.environment, check=True, capture_output=True)
    found = toys.mlflow(name)
    for stage in ("train", "evaluate-base", ""):
        assert found[stage] == ("KILLED", "its process died")


def _tracked(toys: Toys, flow: str) -> str | None:
    """Name of the flow run, once MLflow has its runs of both stages."""
    name = toys.place.name_of(toys.said(flow))
    return name if name and {"train", "evaluate-base"} <= {*toys.mlflow(name)} else None


def _all_ended(toys: Toys, name: str) -> dict | None:
    found = toys.mlflow(name)
    return found if found and all(status != "RUNNING" for status, _ in found.values()) else None
