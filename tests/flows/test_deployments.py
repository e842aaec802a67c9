"""Deployments on a work pool, as prefect.yaml has them: what is refused, what a cancelled run leaves behind."""

import json
import subprocess
import time
import urllib.error

import psutil
import pytest
import yaml

from conf.load import FOLDER
from tests.flows.world import BIN, ROOT, World, end, wait_for


@pytest.fixture(scope="module")
def worker(place: World):
    """Everything deployed, and a worker that runs it."""
    for pool in ("finetune-cpu", "finetune-gpu", "finetune-nodes"):
        place.ask_prefect("work_pools/", name=pool, type="process")
    prefect(place, "--no-prompt", "deploy", "--all")
    command = [BIN / "prefect", "worker", "start", "--pool", "finetune-cpu"]
    with (place.folder / "worker.log").open("w") as log:
        to_log = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=place.environment, **to_log)
        yield process
        end(process)


def prefect(place: World, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [BIN / "prefect", *arguments], cwd=ROOT, env=place.environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_configuration_has_a_deployment_with_a_schedule_that_is_off():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    by_name = {deployment["name"]: deployment for deployment in deployments}
    assert {path.stem for path in FOLDER.glob("*.yaml")} <= {*by_name}
    for deployment in (one for one in deployments if one["entrypoint"].startswith("flows/finetune.py")):
        assert deployment["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
        assert all(schedule["active"] is False for schedule in deployment.get("schedules", []))


def test_the_form_shows_help_limits_and_choices(place, worker):
    (deployment,) = place.ask_prefect("deployments/filter", deployments={"name": {"any_": ["tiny"]}})
    schema = deployment["parameter_openapi_schema"]
    assert schema["properties"]["conf"]["enum"] == sorted(path.stem for path in FOLDER.glob("*.yaml"))
    rate = schema["definitions"]["Optimizer"]["properties"]["lr"]
    assert rate["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
    assert rate["description"]
    assert all("description" in schema["properties"][name] for name in ("conf", "changes", "first", "last"))


@pytest.mark.parametrize(
    "parameters, reason",
    [
        ({"conf": "tinny"}, "tinny"),
        ({"changes": {"optimizer": {"lr": -1}}}, "minimum"),
        ({"changes": {"train": {"stps": 1}}}, "stps"),
        ({"changes": {"model": {"source": 3}}}, "source"),
        ({"last": "trian"}, "trian"),
    ],
)
def test_a_bad_parameter_is_refused_before_a_run_exists(place, worker, parameters, reason):
    before = len(place.ask_prefect("flow_runs/filter"))
    (deployment,) = place.ask_prefect("deployments/filter", deployments={"name": {"any_": ["tiny"]}})
    with pytest.raises(urllib.error.HTTPError) as refused:
        place.ask_prefect(f"deployments/{deployment['id']}/create_flow_run", parameters=parameters)
    with refused.value as answer:
        assert (answer.code, reason in answer.read().decode()) == (409, True)
    assert len(place.ask_prefect("flow_runs/filter")) == before


def test_the_command_line_says_what_is_refused(place, worker):
    before = len(place.ask_prefect("flow_runs/filter"))
    parameter = 'changes={"optimizer": {"lr": -1}}'
    assert "minimum" in prefect(place, "deployment", "run", "finetune/tiny", "-p", parameter, code=1)
    assert len(place.ask_prefect("flow_runs/filter")) == before


@pytest.mark.timeout(200)
def test_a_cancelled_run_leaves_no_process_and_a_checkpoint(place, first, worker):
    """A training that would take an hour; its first steps must be there before it is cancelled."""
    changes = json.dumps({"train": {"steps": 5000}, "optimizer": {"lr": 1e-3}})
    prefect(place, "deployment", "run", "finetune/tiny", "-p", f"changes={changes}")
    (run,) = place.ask_prefect("flow_runs/filter", sort="EXPECTED_START_TIME_DESC", limit=1)
    work = place.folder / "runs/work"
    wait_for(
        lambda: [file for file in work.glob("train-*/files/metrics.jsonl") if '"step": 3' in file.read_text()], 120
    )
    started = [process for process in psutil.Process(worker.pid).children(recursive=True) if process.is_running()]
    assert any("trainer.train" in process.cmdline() for process in started)

    place.ask_prefect(f"flow_runs/{run['id']}/set_state", state={"type": "CANCELLING"})
    cancelled = time.monotonic()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert time.monotonic() - cancelled < 20  # 10 s on an idle machine
    wait_for(lambda: state_of(place, run["id"]) == "Cancelled", 30)
    assert [*work.glob("train-*/files/checkpoints/iter_*/complete.json")]


def state_of(place: World, run: str) -> str:
    return place.ask_prefect("flow_runs/filter", flow_runs={"id": {"any_": [run]}})[0]["state_name"]
