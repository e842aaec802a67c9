"""Deployments on a work pool, as prefect.yaml has them: what is refused, what a cancelled run leaves behind."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectNotFound

from conf.load import FOLDER, load, names
from flows import deploy, scheduling
from flows.new import deployment as new_deployment
from tasks.pages import deployment_form
from tests.flows.conftest import Place
from tests.support.flow_world import BIN, ROOT, end, wait_for


@pytest.fixture(scope="module")
def worker(place: Place):
    """Two deployments of prefect.yaml on a server, and a worker that runs one of them."""
    there = {pool["name"] for pool in place.ask_prefect("work_pools/filter")}  # other files' tests have made some
    for pool in {"finetune-cpu", "finetune-gpu", "finetune-nodes"} - there:
        place.ask_prefect("work_pools/", name=pool, type="process")
    redeploy(place, "tiny", "glm47")
    command = [BIN / "prefect", "worker", "start", "--pool", "finetune-cpu"]
    with (place.folder / "worker.log").open("w") as log:
        to_log = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=place.environment, **to_log)
        yield process
        end(process)


def prefect(place: Place, *arguments: str, code: int = 0) -> str:
    done = place.fork("prefect", *arguments, merged=True)
    assert done.code == code, done.output
    return done.output


def redeploy(place: Place, *names: str) -> str:
    done = place.fork("flows.deploy", *names, merged=True)
    assert done.code == 0, done.output
    return done.output


def deployment(place: Place, name: str) -> dict:
    return place.ask_prefect("deployments/filter", deployments={"name": {"any_": [name]}})[0]


def edit(place: Place, path: str, method: str, body: object) -> None:
    request = urllib.request.Request(f"{place.prefect}/{path}", json.dumps(body).encode(), method=method)
    request.add_header("Content-Type", "application/json")
    for _ in range(10):
        try:
            return urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code != 503:  # SQLite is locked; Prefect's own client asks again as well
                raise
            time.sleep(2)
    raise TimeoutError(path)


def test_every_configuration_has_a_deployment_with_a_schedule_that_is_off():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    by_name = {deployment["name"]: deployment for deployment in deployments}
    assert {path.stem for path in FOLDER.glob("*.yaml")} <= {*by_name}
    for deployment in (one for one in deployments if one["entrypoint"].startswith("flows/finetune.py")):
        assert deployment["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
        assert all(schedule["active"] is False for schedule in deployment.get("first_schedules", []))


def test_prefect_yaml_names_no_schedules_which_each_deployment_would_take_for_all_there_are():
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        assert not {"schedule", "schedules", "paused"} & {*deployment}


@pytest.mark.slow
def test_all_of_prefect_yaml_can_be_deployed(place, worker):
    redeploy(place)
    wanted = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    found = place.ask_prefect("deployments/filter", limit=200)
    assert {one["name"] for one in found} == {one["name"] for one in wanted}


def test_schedules_survive_every_redeploy_and_start_runs_at_once(place, worker):
    """Also by prefect's own command, which knows nothing of them."""
    tiny = deployment(place, "tiny")
    (weekly,) = tiny["schedules"]
    assert (weekly["active"], weekly["slug"], weekly["schedule"]["cron"]) == (False, "weekly", "0 3 * * 1")
    path = f"deployments/{tiny['id']}/schedules"
    prefect(
        place, "deployment", "schedule", "create", "finetune/tiny", "--cron", "4 5 * * *", "--timezone", "Asia/Tokyo"
    )
    edited = {"active": True, "schedule": {"cron": "7 3 * * 6", "timezone": "Europe/Berlin"}}
    edit(place, f"{path}/{weekly['id']}", "PATCH", edited)

    def schedules() -> dict:
        kept = deployment(place, "tiny")["schedules"]
        return {one["id"]: (one["active"], one["schedule"], one["parameters"], one["slug"]) for one in kept}

    def planned() -> set[str]:
        runs = place.ask_prefect("flow_runs/filter", flow_runs={"deployment_id": {"any_": [tiny["id"]]}})
        return {run["created_by"]["id"] for run in runs if run["auto_scheduled"]}

    before = schedules()
    assert len(before) == 2
    try:
        for deploy_again in (
            lambda: prefect(place, "--no-prompt", "deploy", "--name", "tiny"),
            lambda: redeploy(place, "tiny"),
        ):
            deploy_again()
            assert schedules() == before
            wait_for(lambda: planned() == {*before}, 30)
        api = place.prefect
        assert scheduling.unscheduled(api, scheduling.active(api), 0) == []
        assert not any(one.is_fatal for one in scheduling.failing_services(place.folder / "prefect.log"))
    finally:
        for id in schedules():
            edit(place, f"{path}/{id}", "DELETE", {})


def test_a_deployment_with_nothing_new_keeps_the_runs_that_are_due(place, worker):
    """The server drops the runs of whatever is written, and has no time to make one anew that is due in a moment."""
    tiny = deployment(place, "tiny")
    prefect(place, "deployment", "schedule", "create", "finetune/tiny", "--cron", "4 5 * * *")
    (added,) = {one["id"] for one in deployment(place, "tiny")["schedules"]} - {one["id"] for one in tiny["schedules"]}

    def due() -> set[str]:
        runs = place.ask_prefect("flow_runs/filter", flow_runs={"deployment_id": {"any_": [tiny["id"]]}})
        return {run["id"] for run in runs if run["created_by"] and run["created_by"]["id"] == added}

    try:
        wait_for(due, 120)  # the scheduler looks at all of them every 10 s here
        before, written = due(), deployment(place, "tiny")["updated"]
        redeploy(place, "tiny")
        assert before <= due()
        assert deployment(place, "tiny")["updated"] == written
        edit(place, f"deployments/{tiny['id']}", "PATCH", {"parameter_openapi_schema": {}})
        redeploy(place, "tiny")
        assert deployment(place, "tiny")["parameter_openapi_schema"] == tiny["parameter_openapi_schema"]
    finally:
        edit(place, f"deployments/{tiny['id']}/schedules/{added}", "DELETE", {})


def test_what_was_edited_on_the_server_stays_and_is_said(place, worker):
    glm47 = deployment(place, "glm47")
    edits = {
        "paused": True,
        "parameters": {"conf": "glm47", "until_stage": "prepare"},
        "tags": ["gpu", "mine"],
        "description": "mine",
        "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "45"}},
        "concurrency_limit": 7,
    }
    edit(place, f"deployments/{glm47['id']}", "PATCH", edits)
    edit(place, f"deployments/{glm47['id']}/schedules/{glm47['schedules'][0]['id']}", "DELETE", {})
    said = redeploy(place, "glm47")
    there = deployment(place, "glm47")
    assert there["schedules"] == []
    assert {name: there[name] for name in edits if name != "concurrency_limit"} | {
        "concurrency_limit": there["global_concurrency_limit"]["limit"]
    } == edits
    for field in edits:
        assert f"finetune/glm47: {field} stays as edited, " in said
    assert "concurrency_limit stays as edited, 7; prefect.yaml has 1" in said

    edit(place, f"deployments/{glm47['id']}", "PATCH", {name: glm47[name] for name in edits} | {"concurrency_limit": 1})
    assert "stays as edited" not in redeploy(place, "glm47")


def test_a_deployment_that_nobody_has_edited_follows_prefect_yaml():
    there = SimpleNamespace(
        paused=False,
        parameters={"conf": "a"},
        tags=["x"],
        description="d",
        job_variables={},
        global_concurrency_limit=None,
    )
    deployed = {field: deploy.digest(value) for field, value in deploy.editable(there).items()}
    wanted = {"name": "a", "parameters": {"conf": "b"}, "tags": ["y"], "concurrency_limit": {"limit": 2}}
    before = json.dumps(wanted)
    assert deploy.keep("finetune/a", wanted, deploy.edits(there, deployed)) == set()
    assert json.dumps(wanted) == before
    assert deploy.edits(there, {}) == {}  # a server that flows.deploy has not seen
    there.paused = True
    assert deploy.edits(there, {}) == {"paused": True}


def test_a_deployment_that_is_not_there_is_named_with_those_that_are(capsys):
    assert deploy.main(["tinny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("error: tinny: not in prefect.yaml or prefect.own.yaml, which have tiny, ")
        and ", glm47," in line
    )


def test_own_deployments_are_read_from_a_file_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(deploy, "OWN", tmp_path / "prefect.own.yaml")
    tracked = deploy.declared()["deployments"]
    entry = new_deployment.with_deployment("", "desk", "Desk.", False)
    entry = new_deployment.with_deployment(entry, "glm47", "Mine.", True)
    deploy.OWN.write_text(entry)
    by_name = {one["name"]: one for one in deploy.declared()["deployments"]}
    assert [*by_name] == [one["name"] for one in tracked if one["name"] != "glm47"] + ["desk", "glm47"]
    assert by_name["glm47"]["description"] == "Mine." and by_name["desk"]["work_pool"]["name"] == "finetune-cpu"
    glm47 = next(one for one in tracked if one["name"] == "glm47")
    assert by_name["glm47"]["work_pool"] == glm47["work_pool"]
    assert by_name["glm47"]["concurrency_limit"] == glm47["concurrency_limit"]
    deploy.OWN.write_text("deployments: [")
    assert deploy.main([]) == 2 and "error: prefect.own.yaml: not YAML" in capsys.readouterr().err


def test_the_form_shows_help_limits_and_choices(place, worker):
    (deployment,) = place.ask_prefect("deployments/filter", deployments={"name": {"any_": ["tiny"]}})
    schema = deployment["parameter_openapi_schema"]
    assert schema["properties"]["conf"]["enum"] == names()
    rate = schema["definitions"]["Optimizer"]["properties"]["lr"]
    assert (rate["exclusiveMinimum"], rate["maximum"], rate["type"]) == (0, 1, "number")
    assert rate["description"].endswith(f"in tiny: {load('tiny').optimizer.lr}")
    assert all("description" in schema["properties"][name] for name in ("conf", "changes", "from_stage", "until_stage"))


BUILDER = """#!/bin/sh
echo "$@" >>"$0.log"
case "$*" in *broken*) echo "no such registry"; exit 3;; esac
"""


@pytest.fixture
def builder(tmp_path) -> tuple[Path, dict[str, str]]:
    """The log of a program that stands for buildah, and the environment of `finetune deploy`."""
    program = tmp_path / "buildah"
    program.write_text(BUILDER)
    program.chmod(0o755)
    return tmp_path / "buildah.log", {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FINETUNE_COMMIT": "0123abc"}


def test_a_pool_of_kubernetes_gets_an_image_of_the_commit(place, builder):
    """The pool comes from the chart's base job template. Pools of processes get no image."""
    log, environment = builder
    template = json.loads((ROOT / "deploy/helm/work-pool.json").read_text())
    pools = [pool["name"] for pool in place.ask_prefect("work_pools/filter") if pool["type"] == "kubernetes"]
    if "finetune-pods" not in pools:
        place.ask_prefect("work_pools/", name="finetune-pods", type="kubernetes", base_job_template=template)
    own = yaml.safe_load(deploy.FILE.read_text())
    (tiny,) = [one for one in own["deployments"] if one["name"] == "tiny"]
    tiny |= {"name": "tiny-pods", "work_pool": {"name": "finetune-pods", "job_variables": {"shm": "1Gi"}}}
    file = ROOT / "prefect.own.yaml"
    assert not file.exists()
    file.write_text(yaml.safe_dump({"deployments": [tiny]}))
    try:
        done = place.fork("flows.deploy", "tiny-pods", "--image", "r.example/ft", merged=True, **environment)
        assert done.code == 0, done.output
        found = deployment(place, "tiny-pods")
        assert found["version"] == "0123abc" and found["entrypoint"] == "flows.finetune:finetune"
        assert found["job_variables"] == {"shm": "1Gi", "image": "r.example/ft:gpu-0123abc"}
        assert found["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "/work"}}]
        built, pushed = log.read_text().splitlines()
        assert "--build-arg EXTRA=gpu --tag r.example/ft:gpu-0123abc" in built
        assert pushed == "push r.example/ft:gpu-0123abc"
        done = place.fork("flows.deploy", "tiny-pods", "--image", "broken/ft", merged=True, **environment)
        assert done.code == 2 and "error: --image: " in done.output
        assert deployment(place, "tiny-pods")["job_variables"]["image"] == "r.example/ft:gpu-0123abc"
    finally:
        file.unlink()
    done = place.fork("flows.deploy", "node", "--image", "r.example/ft", merged=True, **environment)
    assert done.code == 2


def test_secrets_come_from_blocks_unless_the_environment_has_them(place, monkeypatch):
    from prefect.blocks.system import Secret
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows import secret_blocks

    with temporary_settings({PREFECT_API_URL: place.prefect}):
        for name in ("hf-token", "wandb-api-key", "of-somebody-else"):
            Secret(value=f"{name} of a block").save(name, overwrite=True)
        for name in secret_blocks.NAMES:
            monkeypatch.setenv(name, "")  # and so restored after the test
            monkeypatch.delenv(name)
        monkeypatch.setenv("WANDB_API_KEY", "mine")
        secret_blocks.use()
    found = {name: os.environ[name] for name in secret_blocks.NAMES if name in os.environ}
    assert found == {"HF_TOKEN": "hf-token of a block", "WANDB_API_KEY": "mine"}


@pytest.mark.parametrize(
    "parameters, reason",
    [
        ({"conf": "tinny"}, "tinny"),
        ({"changes": {"optimizer": {"lr": -1}}}, "minimum"),
        ({"learning_rate": 5}, "maximum"),
        ({"changes": {"train": {"stps": 1}}}, "stps"),
        ({"changes": {"model": {"source": 3}}}, "source"),
        ({"until_stage": "trian"}, "trian"),
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


def test_a_cancelled_run_leaves_no_process_and_a_checkpoint(place, first, worker):
    """A training that would take an hour; its first steps must be there before it is cancelled.

    With this template the stages before it are those of the first flow.
    """
    changes = json.dumps({"train": {"steps": 5000}, "optimizer": {"lr": 1e-3}, "data": {"template": "auto"}})
    prefect(place, "deployment", "run", "finetune/tiny", "-p", f"changes={changes}")
    (run,) = place.ask_prefect("flow_runs/filter", sort="EXPECTED_START_TIME_DESC", limit=1)
    work = place.folder / "runs/work"
    wait_for(
        lambda: [file for file in work.glob("train-*/files/metrics.jsonl") if '"step": 3' in file.read_text()], 300
    )
    started = [process for process in psutil.Process(worker.pid).children(recursive=True) if process.is_running()]
    assert any("trainer.train" in process.cmdline() for process in started)

    place.ask_prefect(f"flow_runs/{run['id']}/set_state", state={"type": "CANCELLING"})
    cancelled = time.monotonic()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert time.monotonic() - cancelled < 20  # 10 s on an idle machine
    wait_for(lambda: state_of(place, run["id"]) == "Cancelled", 90)
    assert [*work.glob("train-*/files/checkpoints/iter_*/complete.json")]


def state_of(place: Place, run: str) -> str:
    return place.ask_prefect("flow_runs/filter", flow_runs={"id": {"any_": [run]}})[0]["state_name"]


class Variables(dict):
    """A server's variables, as Prefect's own models check them."""

    def read_variable_by_name(self, name):
        return self.get(name)

    def create_variable(self, made):
        self[made.name] = made

    def update_variable(self, made):
        self[made.name] = made


def test_what_was_deployed_is_remembered_for_each_deployment():
    """One variable for all of them was too long for Prefect from the 42nd on."""
    server, digests = Variables(), {field: deploy.digest(field) for field in (*deploy.EDITABLE, deploy.LIMIT)}
    server.create_variable(VariableCreate(name=deploy.DEPLOYED, value={"finetune/old": {"paused": "a"}}))
    for number in range(500):
        deploy.write_deployed(server, f"finetune/A long name. {number}", digests)
        deploy.write_deployed(server, f"finetune/A long name. {number}", digests)
    assert len(server) == 501 and digests.items() <= deploy.read_deployed(server, "finetune/A long name. 7").items()
    assert deploy.read_deployed(server, "finetune/old") == {"paused": "a"}  # of a server of before
    assert deploy.read_deployed(server, "finetune/new") == {}


class Server(Variables):
    """A server's deployments as well, to which the command prefect deploy brings its file."""

    def __init__(self):
        self.deployments, self.written, self.forms = {}, [], []

    def read_deployment_by_name(self, name):
        if name not in self.deployments:
            raise ObjectNotFound(Exception(name))
        return self.deployments[name]

    def update_deployment(self, id, update):
        self.forms.append(id)
        self.deployments[id].parameter_openapi_schema = update.parameter_openapi_schema

    def prefect_deploy(self, command, **_):
        for one in yaml.safe_load(Path(command[-1]).read_text())["deployments"]:
            name = f"{one['entrypoint'].rpartition(':')[2]}/{one['name']}"
            fields = {field: one.get(field) for field in ("parameters", "tags", "description")}
            self.deployments[name] = SimpleNamespace(
                **fields, id=name, paused=False, job_variables={}, global_concurrency_limit=None
            )
            self.deployments[name].parameter_openapi_schema = {}
            self.written.append(name)
        return SimpleNamespace(returncode=0)


def test_a_form_is_made_once_where_there_is_a_configuration_and_nowhere_else(monkeypatch):
    server, made = Server(), []
    values = deployment_form.with_values

    def with_values(schema, run):
        made.append(run.name)
        return values(schema, run)

    monkeypatch.setattr(deployment_form, "with_values", with_values)
    monkeypatch.setattr(deploy.subprocess, "run", server.prefect_deploy)
    tiny = {"name": "tiny", "entrypoint": "flows/finetune.py:finetune", "parameters": {"conf": "tiny"}}
    node = {"name": "nodes", "entrypoint": "flows/node.py:node"}

    def redeploy():
        for told in (made, server.written, server.forms):
            told.clear()
        assert deploy.deploy(server, {"deployments": [{**tiny}, {**node}]}) == 0
        return made, server.written, server.forms

    assert redeploy() == (["tiny"], ["finetune/tiny", "node/nodes"], ["finetune/tiny"])
    assert redeploy() == (["tiny"], [], [])
    tiny["description"] = "Another one."
    assert redeploy() == (["tiny"], ["finetune/tiny"], ["finetune/tiny"])
    parameters = deploy.parameters_of
    monkeypatch.setattr(deploy, "parameters_of", lambda entrypoint: parameters(entrypoint) | {"title": "Changed"})
    assert redeploy() == (["tiny"], ["finetune/tiny", "node/nodes"], ["finetune/tiny"])
