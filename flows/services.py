"""Services for trying the deployments out on this host: a Prefect server, an MLflow server and workers.

    python -m flows.services up          start what is not running, deploy everything, print the addresses
    python -m flows.services down        stop just those
    python -m flows.services status

`make up` and `make down` do the same. State lies in runs/services: a file with the processes, and a log of each. All
listen on the loopback address alone. FINETUNE_RUNS moves it; ports are 4200 and 5000, or the next free ones.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from contract import closed_pipe, json_object
from contract.faults import Fault
from contract.files import write_atomically
from contract.processes import started
from flows import packages, scheduling
from flows.arguments import refused
from flows.scheduling import Trouble
from tasks.run.places import runs_folder
from tasks.store.durable import plainly

HOST = "127.0.0.1"
READY_WITHIN = 300.0  # both servers make their databases at the first start; a busy host took more than 120
LEAVE_WITHIN = 20.0  # a worker that is told to leave cancels its runs first
SCHEDULED_WITHIN = 45.0  # the scheduler looks at what was deployed each 5 s, a worker that was started comes in 5
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
# A schedule that is made by hand is seen when Prefect next looks at all of them: a cron that was due within its 60
# seconds would have its next run in a year.
SCHEDULED_OFTEN = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5"}
BIN = Path(sys.executable).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.services", description=__doc__.partition("\n")[0])
    parser.add_argument("do", choices=("up", "down", "status"))
    try:
        return {"up": up, "down": down, "status": status}[parser.parse_args().do]()
    except Fault as fault:
        return refused(fault)


def up() -> int:
    running = _running()
    servers = {"prefect": ("/api/health", 4200), "mlflow": ("/health", 5000)}
    for name, (health, port) in servers.items():
        if name not in running:
            port = _free_port(port)
            address = f"http://{HOST}:{port}"
            page = {"PREFECT_SERVER_UI_API_URL": f"{address}/api"}  # which its page asks; at 4200 unless told
            running[name] = _start(
                name, _server(name, port), address, SCHEDULED_OFTEN | _without_servers() | QUIET | page
            )
            _save(running)
            if not _is_healthy(running[name]["address"] + health, running[name]):
                print(f"error: {name} did not come up; its log: {_folder() / f'{name}.log'}", file=sys.stderr)
                return 1
    environment = _environment(running)
    for pool in ("finetune-cpu", "finetune-gpu", "finetune-nodes"):
        if not _answers(f"{environment['PREFECT_API_URL']}/work_pools/{pool}", 30):  # what was edited there stays
            _done(environment, str(BIN / "prefect"), "work-pool", "create", pool, "--type", "process")
    print(_done(environment, sys.executable, "-m", "flows.deploy"), end="")
    for pool in ["finetune-cpu"] + ["finetune-gpu"] * _has_gpu():
        if f"worker-{pool}" not in running:
            command = [BIN / "prefect", "worker", "start", "--pool", pool, "--name", f"{pool}-{socket.gethostname()}"]
            running[f"worker-{pool}"] = _start(f"worker-{pool}", command, "", environment)
            _save(running)
    status()
    troubles = _troubles(running, environment["PREFECT_API_URL"])
    print(f"\nexport PREFECT_API_URL={environment['PREFECT_API_URL']}")
    print(f"export MLFLOW_TRACKING_URI={environment['MLFLOW_TRACKING_URI']}")
    print(f"{_shown(BIN / 'prefect')} deployment run finetune/tiny --watch")
    for is_fatal, fact, mend in troubles:
        print(f"{'error' if is_fatal else 'warning'}: {fact}  ->  {mend}", file=sys.stderr)
    return int(any(trouble.is_fatal for trouble in troubles))


def down() -> int:
    running = _running()
    for name in sorted(running, reverse=True):  # workers before the servers that they talk to
        _signal(running[name], signal.SIGTERM)
        if name.startswith("worker"):
            _wait([running[name]])
    _wait(list(running.values()))
    for name, process in running.items():
        print(f"stopped {name} (process {process['pid']})")
    _save({})
    return 0


def status() -> int:
    running = _running()
    for name, process in sorted(running.items()):
        print(f"{name.ljust(20)}  {process['address'] or 'running'}  (process {process['pid']})")
    if not running:
        print("nothing is running; make up starts it")
    return 0 if running else 1


def _troubles(running: dict, api: str) -> list[Trouble]:
    """Problems that keep schedules from running.

    The scheduler takes some seconds after a deployment, and a worker to come.
    """
    own = [f"work pool {name.partition('-')[2]} " for name in running if name.startswith("worker-")]
    until = time.monotonic() + SCHEDULED_WITHIN
    try:
        deployments = scheduling.active(api)
        while True:
            dead, unattended = scheduling.unscheduled(api, deployments, 0), scheduling.unattended(api, deployments)
            if time.monotonic() > until or not (dead or any(pool in one.fact for one in unattended for pool in own)):
                break
            time.sleep(1)
    except scheduling.Silent as silent:
        dead, unattended = [Trouble(True, f"schedules: Prefect's server {silent}", "make doctor")], []
    server = running["prefect"]
    errors = scheduling.failing_services(Path(server["log"]), server["log_from"]) if "log" in server else []
    clashes = [Trouble(True, clash, "sh setup.sh") for clash in packages.clashes(packages.installed())]
    return clashes + errors + dead + unattended


def _server(name: str, port: int) -> list:
    if name == "prefect":
        return [BIN / "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    runs = runs_folder()
    store = ["--backend-store-uri", f"sqlite:///{runs / 'mlflow.db'}", "--artifacts-destination"]
    place = ["--host", HOST, "--port", str(port), "--workers", "1"]  # of four, each takes 250 MB
    return [BIN / "mlflow", "server", *place, *store, str(runs / "mlflow-artifacts")]


def _environment(running: dict) -> dict[str, str]:
    addresses = {
        "PREFECT_API_URL": running["prefect"]["address"] + "/api",
        "MLFLOW_TRACKING_URI": running["mlflow"]["address"],
    }
    return os.environ | addresses | {"FINETUNE_RUNS": str(runs_folder())}


def _done(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join([Path(command[0]).name, *command[1:]])}: {done.stdout}{done.stderr}")
    return done.stdout


def _without_servers() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}


def _start(name: str, command: list, address: str, environment: dict[str, str]) -> dict:
    path = _folder() / f"{name}.log"
    with path.open("a") as log:
        begin = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    place = {"address": address, "log": str(path), "log_from": begin}
    return {"pid": process.pid, "started": started(process.pid)} | place


def _running() -> dict[str, dict]:
    """Processes of the file that still are the same: a number alone may be another process by now."""
    path = _folder() / "processes.json"
    try:
        noted = json_object.read(path) if path.exists() else {}
        return {name: process for name, process in noted.items() if started(process["pid"]) == process["started"]}
    except (Fault, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, Fault) else f"{path}: not what make up writes ({error!r})"
        raise Fault(
            f"{reason}; what make up has started is not known any more: remove the file, and end it by hand"
        ) from None


def _save(running: dict) -> None:
    with plainly(_folder()):
        write_atomically(_folder() / "processes.json", json.dumps(running, indent=1), durable=False)


def _signal(process: dict, number: int) -> None:
    """Send a signal to the process's whole session: an MLflow server has workers of its own."""
    if started(process["pid"]) == process["started"]:
        os.killpg(process["pid"], number)


def _wait(processes: list[dict]) -> None:
    until = time.monotonic() + LEAVE_WITHIN
    for process in processes:
        while started(process["pid"]) == process["started"]:
            if time.monotonic() > until:
                _signal(process, signal.SIGKILL)
            time.sleep(0.1)


def _is_healthy(url: str, process: dict) -> bool:
    until = time.monotonic() + READY_WITHIN
    while time.monotonic() < until and started(process["pid"]) == process["started"]:
        if _answers(url):
            return True
        time.sleep(0.2)
    return False


def _answers(url: str, seconds: float = 2) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds):
            return True
    except OSError:
        return False


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((HOST, port))
            except OSError:
                continue
            return port
    sys.exit(f"error: no free port from {first} on")


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _folder() -> Path:
    folder = runs_folder() / "services"
    with plainly(runs_folder()):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _shown(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    with closed_pipe.quiet():
        sys.exit(main())
