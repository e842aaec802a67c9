"""`make up` as a user has it: in a folder of its own, again and again, with schedules that start runs."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import flows.services
from contract.faults import Fault
from tests.flows.test_deployments import deployment, edit
from tests.support.flow_world import BIN, ROOT, World, wait_for

EARLIEST = timedelta(seconds=-1)  # Prefect's timer has no more than a second
LATEST = timedelta(seconds=60)  # a worker asks each 10 s; the rest is for a machine that has much to do


class Services:
    """`python -m flows.services` with these variables."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment

    def __call__(self, do: str) -> str:
        command = [sys.executable, "-m", "flows.services", do]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def services(tmp_path):
    """In a folder of its own; nothing of it is left afterwards."""
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"FINETUNE_RUNS": str(tmp_path / "runs"), "PREFECT_HOME": str(tmp_path / "prefect"), "NO_COLOR": "1"}

    made = Services(environment)
    yield made
    made("down")


def of(services, tmp_path, output: str) -> World:
    """The servers of `make up`, by the lines that it prints."""
    addresses = dict(line[len("export ") :].split("=", 1) for line in output.splitlines() if line.startswith("export "))
    return World(tmp_path, services.environment | addresses, addresses["PREFECT_API_URL"], "")


def a_minute_ahead(place: World) -> datetime:
    """Makes the schedule by hand; says when its run is due, in 25 seconds at least."""
    due = (datetime.now(UTC) + timedelta(seconds=85)).replace(second=0, microsecond=0)
    cron = f"{due.minute} {due.hour} {due.day} {due.month} *"
    command = [
        BIN / "prefect",
        "deployment",
        "schedule",
        "create",
        "finetune/tiny",
        "--cron",
        cron,
        "--timezone",
        "UTC",
    ]
    done = subprocess.run(command, cwd=ROOT, env=place.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return due


def runs_due(place: World, due: datetime) -> list[dict]:
    between = {"after_": (due - timedelta(seconds=1)).isoformat(), "before_": (due + timedelta(seconds=1)).isoformat()}
    runs = place.ask_prefect("flow_runs/filter", flow_runs={"expected_start_time": between})
    return [run for run in runs if run["state_type"] == "COMPLETED"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cron_a_minute_ahead_runs_before_and_after_a_second_make_up(services, tmp_path):
    place = of(services, tmp_path, services("up"))
    tiny = deployment(place, "tiny")
    edit(place, f"deployments/{tiny['id']}", "PATCH", {"parameters": {"conf": "tiny", "until_stage": "download"}})
    before = tiny["schedules"]
    for again in (False, True):
        due = a_minute_ahead(place)
        if again:
            before = deployment(place, "tiny")["schedules"]
            assert 'parameters stays as edited, {"conf": "tiny", "until_stage": "download"}' in services("up")
            assert deployment(place, "tiny")["schedules"] == before
        (run,) = wait_for(lambda due=due: runs_due(place, due), 400)
        assert (run["auto_scheduled"], run["created_by"]["type"]) == (True, "SCHEDULE")
        late = datetime.fromisoformat(run["start_time"]) - due
        assert EARLIEST <= late < LATEST, late

    services("down")
    place = of(services, tmp_path, services("up"))
    assert deployment(place, "tiny")["schedules"] == before


@pytest.mark.timeout(60)
def test_the_first_line_comes_at_once(services):
    command = [sys.executable, "-m", "flows.services", "up"]
    process = subprocess.Popen(command, cwd=ROOT, env=services.environment, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert select.select([process.stdout], [], [], 20)[0], "20 s without output"
            line = process.stdout.readline() if process.stdout else ""
            assert line == "make up: Prefect server, MLflow server, workers, deployments\n"
        finally:
            process.kill()


@pytest.fixture
def up(tmp_path, monkeypatch):
    """Returns a function that starts a toy in a service's place, and notes it as `make up` does."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    noted: dict[str, dict] = {}

    def start(name: str, code: str) -> int:
        noted[name] = flows.services._start(name, [sys.executable, "-c", code], "http://127.0.0.1:1", {**os.environ})
        flows.services._save(noted)
        return noted[name]["pid"]

    return start


@pytest.mark.filterwarnings("ignore:Exception ignored in.*Popen:pytest.PytestUnraisableExceptionWarning")
def test_down_ends_what_a_killed_worker_has_left_in_another_session(up, tmp_path, monkeypatch, capsys):
    """A worker starts each run in another session: nothing but an environment leads to it."""
    flow = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); print(flush=True)"
    worker = up("worker-toy", f"{flow}\nimport time; time.sleep(600)")
    log = tmp_path / "services/worker-toy.log"
    wait_for(log.read_text, 30)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    monkeypatch.setattr(sys, "argv", ["services", "down"])
    assert flows.services.main() == 0
    assert "stopped leftover" in capsys.readouterr().out
    assert not flows.services._left()


def test_a_second_make_up_waits_for_the_first_and_names_it(up, monkeypatch, capsys):
    monkeypatch.setattr("flows.services.OTHER_WITHIN", 0.3)
    with flows.services._turn():
        monkeypatch.setattr(sys, "argv", ["services", "up"])
        assert flows.services.main() == 2
    under_way = f"another make up or make down (process {os.getpid()}) is under way"
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == under_way and said.err == f"error: {under_way}: not ready after 0 s\n"


def test_mlflow_does_not_start_while_a_run_makes_its_database(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    monkeypatch.setattr("flows.services.READY_WITHIN", 0.3)
    monkeypatch.setattr("flows.services.answers", lambda url: True)
    up = {"prefect": {"address": "", "log": "x"}}
    with (tmp_path / "mlflow.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Fault, match="MLflow's database, which a run has locked: not ready after 0 s"):
            flows.services._start_servers(up)
    assert [*up] == ["prefect"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_make_up_takes_over_the_server_of_a_run_and_refuses_none_of_the_next(services, tmp_path):
    """All runs are on one page; then SIGKILL of everything but the server, and `make down`, leave nothing."""
    output = tmp_path / "output"
    command = [sys.executable, "-m", "flows.finetune", "tiny", "--until", "convert"]
    with output.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, env=services.environment, stdout=file, stderr=file)
    wait_for(lambda: run.poll() is not None or "Beginning flow run" in output.read_text(), 300)
    assert run.poll() is None, output.read_text()
    place = of(services, tmp_path, services("up"))
    (server,) = [line.split()[1] for line in services("status").splitlines() if line.startswith("prefect ")]
    assert place.prefect == f"{server}/api"
    assert run.wait(600) == 0 and f"Prefect, this run: {server}/" in output.read_text(), output.read_text()
    asked = {"parameters": {"conf": "tiny", "until_stage": "download"}, "state": {"type": "SCHEDULED"}}
    url = f"{place.prefect}/deployments/{deployment(place, 'tiny')['id']}/create_flow_run"
    form = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with ThreadPoolExecutor(5) as threads:  # as the page does: nothing is asked again
        assert [*threads.map(lambda _: urllib.request.urlopen(form, timeout=60).status, range(5))] == [201] * 5
    wait_for(lambda: {run["state_type"] for run in place.ask_prefect("flow_runs/filter")} >= {"RUNNING"}, 300)
    for pid in users_of(tmp_path):
        if "tasks.servers.prefect_process" not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    services("down")
    assert users_of(tmp_path) == []


def users_of(folder: Path) -> list[int]:
    """Processes that know this folder of runs."""
    mark = f"FINETUNE_RUNS={folder}/runs".encode()
    paths = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


DAMAGED = ("", '{"prefect": {"pid": 1', "[]", '{"prefect": 1}', '{"prefect": {"pid": 1}}', "\xff")


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("do", ["status", "down"])
def test_a_file_of_processes_that_is_damaged_is_a_line(tmp_path, monkeypatch, capsys, content, do):
    """Without it nobody knows any more what is to be stopped."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    path = tmp_path / "services" / "processes.json"
    path.parent.mkdir()
    path.write_text(content, "latin-1")
    monkeypatch.setattr(sys, "argv", ["services", do])
    assert flows.services.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ") and "end the processes that make up has started by hand" in line
    assert path.read_text("latin-1") == content


def test_a_file_in_the_place_of_the_folder_is_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").touch()
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "argv", ["services", "status"])
    assert flows.services.main() == 2
    assert capsys.readouterr().err.endswith(f"; {tmp_path}/runs must be a writable folder\n")
