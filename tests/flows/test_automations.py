"""A flow run whose process or host dies goes on by itself: so often, and not where somebody has ended it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from uuid import uuid4

import psutil
import pytest
import yaml

from flows.automations import AUTOMATIONS
from tests.support.flow_world import BIN, ROOT, World, end, wait_for

CHANGES = {"train": {"steps": 200}, "checkpoint": {"save_every": 20}, "optimizer": {"lr": 2e-3}}
RESTARTS, AWAITING = 5, "AwaitingRestart"
SILENCE = 100  # seconds; more than three beats
ENGINES = ("prefect.engine", "prefect.flow_engine", "_workspace_runtime_bootstrap.py")


def covers(trigger, name: str, flow: str = "finetune", deployed: bool = True, **labels: str) -> bool:
    """Whether the server would look at this event for that automation."""
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    related = [
        {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow", "prefect.resource.name": flow}
    ]
    if deployed:
        related += [{"prefect.resource.id": "prefect.deployment.1", "prefect.resource.role": "deployment"}]
    resource = {"prefect.resource.id": "prefect.flow-run.1"}
    resource |= {f"prefect.{key.replace('_', '-')}": value for key, value in labels.items()}
    event = ReceivedEvent(
        occurred=datetime.now(UTC), event=f"prefect.flow-run.{name}", resource=resource, related=related, id=uuid4()
    )
    return EventTrigger.model_validate(trigger.model_dump()).covers(event)


def test_every_deployment_beats_ten_times_before_it_is_found_silent():
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        beat = int(deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert beat >= 30  # flow_engine.MINIMUM_HEARTBEAT_INTERVAL
        assert 10 * beat <= AUTOMATIONS[0].trigger.within.total_seconds()


def test_what_has_crashed_or_is_silent_and_nothing_else():
    silent, crashed, awaiting = (automation.trigger for automation in AUTOMATIONS)
    assert covers(silent, "heartbeat")
    assert covers(silent, "heartbeat", flow="node")
    assert not covers(silent, "heartbeat", flow="another")
    assert not covers(silent, "heartbeat", deployed=False)  # Prefect's own pace: it would be found silent
    for end_of_run in ("Completed", "Failed", "Cancelled", "Crashed"):
        assert covers(silent, end_of_run, state_type=end_of_run.upper(), run_count="1")

    assert covers(crashed, "Running", state_type="RUNNING", run_count="1")
    assert covers(crashed, "Crashed", state_type="CRASHED", run_count="1")
    assert covers(crashed, "Crashed", state_type="CRASHED", run_count=str(RESTARTS))
    assert not covers(crashed, "Crashed", state_type="CRASHED", run_count=str(RESTARTS + 1))
    assert not covers(crashed, "Crashed", state_type="CRASHED", run_count="0")
    assert not covers(crashed, "Crashed", state_type="FAILED", run_count="1")  # a stage's unknown error
    assert not covers(crashed, "Crashed", state_type="CRASHED", run_count="1", flow="node")
    assert not covers(crashed, "Crashed", state_type="CRASHED", run_count="1", deployed=False)
    for end_of_run in ("Completed", "Failed", "Cancelled"):
        assert not covers(crashed, end_of_run, state_type=end_of_run.upper(), run_count="1")

    assert covers(awaiting, AWAITING, state_type="CRASHED", run_count="1")
    assert not covers(awaiting, AWAITING, state_type="CRASHED", run_count="1", flow="node")


def test_a_server_is_named():
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    done = subprocess.run([sys.executable, "-m", "flows.automations"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "PREFECT_API_URL" in done.stderr


@pytest.fixture(scope="module")
def deployed(place: World) -> World:
    for pool in ("finetune-cpu", "finetune-gpu", "finetune-nodes"):
        call(place, BIN / "prefect", "work-pool", "create", pool, "--type", "process", "--overwrite")
    call(place, BIN / "prefect", "--no-prompt", "deploy", "--name", "tiny")
    assert automations(place) == ["made"] * 3
    assert automations(place) == ["there already"] * 3
    narrow(place)
    return place


def call(place: World, *command: object) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=place.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def automations(place: World, *arguments: str) -> list[str]:
    lines = call(place, sys.executable, "-m", "flows.automations", *arguments).splitlines()
    return [line.rpartition(": ")[2] for line in lines]


def narrow(place: World) -> None:
    """What would take minutes takes less here."""
    for automation in place.ask_prefect("automations/filter"):
        if automation["trigger"]["posture"] == "Proactive":
            automation["trigger"]["within"] = {300: SILENCE, 60: 30}[automation["trigger"]["within"]]
            kept = ("name", "description", "enabled", "tags", "trigger", "actions")
            body = json.dumps({key: automation[key] for key in kept}).encode()
            request = urllib.request.Request(f"{place.prefect}/automations/{automation['id']}", body, method="PUT")
            request.add_header("Content-Type", "application/json")
            urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def worker(place: World):
    command = [BIN / "prefect", "worker", "start", "--pool", "finetune-cpu"]
    with (place.folder / "worker-automations.log").open("a") as log:
        to_log = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=place.environment, **to_log)
        try:
            yield process
        finally:
            end(process)


def start(place: World, **parameters: object) -> str:
    given = [part for name, value in parameters.items() for part in ("-p", f"{name}={json.dumps(value)}")]
    call(place, BIN / "prefect", "deployment", "run", "finetune/tiny", *given)
    return place.ask_prefect("flow_runs/filter", sort="EXPECTED_START_TIME_DESC", limit=1)[0]["id"]


def run_of(place: World, id: str) -> dict:
    return place.ask_prefect("flow_runs/filter", flow_runs={"id": {"any_": [id]}})[0]


def flow_of(process: subprocess.Popen) -> psutil.Process:
    """What imports the flow, below a worker."""
    for below in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(part.endswith(ENGINES) for part in below.cmdline()):
                return below
    raise AssertionError([below.cmdline() for below in psutil.Process(process.pid).children(recursive=True)])


def trained_to(place: World, step: int) -> bool:
    files = (place.folder / "runs/work").glob("train-*/files/metrics.jsonl")
    return any(f'"step": {step},' in file.read_text() for file in files)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_process_is_killed_and_then_its_host_goes_on_to_its_end(deployed):
    from mlflow import MlflowClient

    with worker(deployed) as host:
        id = start(deployed, changes=CHANGES, until_stage="train")
        wait_for(lambda: trained_to(deployed, 30), 400)
        flow_of(host).kill()
        name = run_of(deployed, id)["name"]
        wait_for(lambda: trained_to(deployed, 100), 400)
        assert run_of(deployed, id)["run_count"] == 2
        for process in [above := psutil.Process(host.pid), *above.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        host.wait()
    died = time.monotonic()
    with worker(deployed):
        wait_for(lambda: run_of(deployed, id)["run_count"] == 3, 600)
        assert time.monotonic() - died > SILENCE - 30
        wait_for(lambda: run_of(deployed, id)["state_type"] == "COMPLETED", 600)
    assert run_of(deployed, id)["name"] == name
    client = MlflowClient(deployed.mlflow)
    runs = client.search_runs(["1"], "tags.finetune.stage = 'train' and params.`optimizer.lr` = '0.002'")
    assert [run.info.status for run in runs] == ["FINISHED"]
    steps = [metric.step for metric in client.get_metric_history(runs[0].info.run_id, "loss/training")]
    assert sorted(steps) == list(range(1, 201))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_crashes_each_time_is_left_alone_in_the_end(deployed):
    with worker(deployed) as host:
        id = start(deployed, changes={"data": {"seed": 7}}, until_stage="download")
        for count in range(1, RESTARTS + 2):
            wait_for(lambda count=count: run_of(deployed, id)["run_count"] == count, 300)
            flow_of(host).kill()
        wait_for(lambda: run_of(deployed, id)["state_type"] == "CRASHED", 60)
        time.sleep(60)
        run = run_of(deployed, id)
        assert (run["state_type"], run["run_count"]) == ("CRASHED", RESTARTS + 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_cancelled_stays_so(deployed):
    with worker(deployed) as host:
        id = start(deployed, changes={"optimizer": {"lr": 1.5e-3}, "train": {"steps": 5000}}, until_stage="train")
        wait_for(lambda: run_of(deployed, id)["state_type"] == "RUNNING", 300)
        flow = flow_of(host)
        deployed.ask_prefect(f"flow_runs/{id}/set_state", state={"type": "CANCELLING"})
        wait_for(lambda: run_of(deployed, id)["state_type"] == "CANCELLED", 120)
        wait_for(lambda: not flow.is_running(), 30)
        time.sleep(30)  # a worker asks every 10 s
        run = run_of(deployed, id)
        assert (run["state_type"], run["run_count"]) == ("CANCELLED", 1)


@pytest.mark.slow
def test_they_are_removed(deployed):
    assert automations(deployed, "--delete") == ["removed"] * 3
    assert automations(deployed, "--delete") == ["not there"] * 3
