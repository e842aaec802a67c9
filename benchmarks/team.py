"""20 flows at once on the services of deploy/compose/compose.yaml, which are processes here; two flows are killed.

    python -m benchmarks.team              make bench-team; needs PostgreSQL's programs
    python -m benchmarks.team --limit 4    at most 4 flows at a time

Commands, variables and secrets are those of the file; each service sees only its own. Addresses, folders and ports are
replaced. S3 is moto's. The flows share a base and train four models. Two flows are killed by SIGKILL while they train;
the server's automations restart them. The benchmark fails if a flow is lost, a stage was made twice, a step is missing
in MLflow or there twice, or a byte in the store is wrong.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.workspace import MARK, workspace
from tests.support import s3_server
from tests.support.flow_world import BIN, free_port, wait_for

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deploy/compose/compose.yaml"
FLOWS, TRAININGS, STEPS, SAVED, KILLED = 20, 4, 100, 20, 2
WITHIN = 3600.0
CHANGES = {
    "train": {"steps": STEPS, "validate_every": 50, "validate_batches": 1},
    "checkpoint": {"save_every": SAVED},
    "evaluate": {"tasks": []},
}
SHARED, OWN = ("download", "prepare", "convert"), ("train", "export")  # once in all; once for each training


@dataclass
class Services:
    """The services of the file as processes, in a folder."""

    folder: Path
    limit: int
    file: dict = field(init=False)
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in ("5432", "4200", "5000")})
    address: str = ""  # of S3
    peak: Counter = field(default_factory=Counter)  # connections by database
    stages: Counter = field(default_factory=Counter)  # tasks by stage and state
    verified: str = ""  # last line of flows.artifacts verify
    ask: Callable[[str], str] = lambda query: ""  # asks PostgreSQL

    def __post_init__(self) -> None:
        self.file = yaml.safe_load(self._interpolated(COMPOSE.read_text()))
        for name in self.file["secrets"]:
            value = {"HF_TOKEN": "unused"}.get(name, f"secret-of-{name}")
            for service, content in self.file["services"].items():
                if name in content.get("secrets", ()):
                    (self.folder / service / "secrets").mkdir(parents=True, exist_ok=True)
                    (self.folder / service / "secrets" / name).write_text(value)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.ports['4200']}/api"

    @property
    def mlflow(self) -> str:
        return f"http://127.0.0.1:{self.ports['5000']}"

    def environment(self, name: str) -> dict[str, str]:
        own = {
            key: self._here(name, value) for key, value in self.file["services"][name].get("environment", {}).items()
        }
        kept = {key: os.environ[key] for key in (MARK, "LANG") if key in os.environ}
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return kept | quiet | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self.folder / name)} | own

    def start(self, name: str) -> subprocess.Popen:
        """Start a service with the file's entrypoint and command."""
        service = self.file["services"][name]
        service["command"][-1] = service["command"][-1].replace("flows.deploy", "flows.deploy tiny")  # not all 50
        command = [self._here(name, word) for word in service["entrypoint"] + service["command"]]
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(command, cwd=self.folder / name, env=self.environment(name), stdout=log, stderr=log)

    def healthy(self, name: str) -> None:
        """Wait for the file's health check."""
        test = [self._here(name, word) for word in self.file["services"][name]["healthcheck"]["test"][1:]]
        env = self.environment(name)
        wait_for(lambda: not subprocess.run(test, env=env, capture_output=True).returncode, 600)

    @contextlib.contextmanager
    def postgres(self) -> Iterator[None]:
        """PostgreSQL with the file's options and databases, as a normal user."""
        binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not binaries and not shutil.which("postgres"):
            sys.exit("benchmarks.team: no PostgreSQL here: apt-get install postgresql")
        programs = binaries[-1] if binaries else Path(shutil.which("postgres") or "").parent
        service, data = self.file["services"]["postgres"], self.folder / "postgres"
        settings, user = service["environment"], "postgres" if os.geteuid() == 0 else None
        self.folder.chmod(0o711)
        if user:
            for path in (data, *data.rglob("*")):
                shutil.chown(path, user)
        password = data / "secrets/PGPASSWORD"
        cluster, port, log = data / "data", self.ports["5432"], (self.folder / "postgres.log").open("w")
        quiet = {"user": user, "cwd": data, "stdout": log, "stderr": log}
        initdb = ["initdb", "-D", cluster, "-U", settings["POSTGRES_USER"], "--auth=scram-sha-256", "-E", "UTF8"]
        subprocess.run([programs / initdb[0], *initdb[1:], f"--pwfile={password}"], check=True, **quiet)
        options = ["-D", cluster, "-p", str(port), "-k", data, "-h", "127.0.0.1"]
        server = subprocess.Popen([programs / "postgres", *options, *service["command"][1:]], **quiet)
        try:
            env = os.environ | {"PGPASSWORD": password.read_text(), "PGHOST": "127.0.0.1", "PGPORT": str(port)}
            psql = [programs / "psql", "-q", "-v", "ON_ERROR_STOP=1", "-U", settings["POSTGRES_USER"], "-d"]
            wait_for(lambda: not subprocess.run([*psql, "postgres", "-c", ""], env=env, capture_output=True).returncode)
            sql = f"CREATE DATABASE {settings['POSTGRES_DB']};" + (COMPOSE.parent / "databases.sql").read_text()
            for statement in filter(str.strip, sql.split(";")):
                subprocess.run([*psql, "postgres", "-c", statement], env=env, check=True)
            self.ask = lambda query: subprocess.check_output([*psql, "postgres", "-Atc", query], env=env, text=True)
            yield
        finally:
            server.send_signal(signal.SIGINT)  # with SIGTERM it would wait for its clients
            server.wait(60)

    def sample(self, done: threading.Event) -> None:
        """Keep the highest number of connections of each database."""
        query = "select datname, count(*) from pg_stat_activity where datname is not null group by 1"
        while not done.wait(2):
            with contextlib.suppress(subprocess.SubprocessError):
                for line in self.ask(query).split():
                    name, count = line.split("|")
                    self.peak[name] = max(self.peak[name], int(count))

    def request(self, path: str, body: dict | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.api}/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=600) as answer:  # the host is busy
            return json.loads(answer.read() or "null")

    def _interpolated(self, text: str) -> str:
        """Replace variables as compose does."""
        own = {"LIMIT": str(self.limit)}
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: own.get(m[1], m[2]), text)
        return text.replace("$$", "$")

    def _here(self, name: str, text: str) -> str:
        """Replace addresses, ports and folders of containers by those of this host."""
        for host, port in (
            ("postgres", "5432"),
            ("prefect", "4200"),
            ("mlflow", "5000"),
            ("localhost", "4200"),
            ("localhost", "5000"),
        ):
            text = text.replace(f"{host}:{port}", f"127.0.0.1:{self.ports[port]}")
        text = text.replace("http://s3:9000", self.address).replace("0.0.0.0", "127.0.0.1")
        text = text.replace("/run/secrets", str(self.folder / name / "secrets"))
        text = re.sub(r"(?<![\w/.])/work\b", str(self.folder / name), text)
        return str(self.ports.get(text, text))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.team", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flows", type=int, default=FLOWS)
    parser.add_argument("--limit", type=int, help="flows at a time; default: all")
    options = parser.parse_args()
    with workspace("team") as folder, contextlib.ExitStack() as stack:
        services = Services(folder, options.limit or options.flows)
        services.address, _ = stack.enter_context(s3_server.running())
        began = time.monotonic()
        stack.enter_context(services.postgres())
        try:
            return measure(services, options.flows, began)
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}", log.read_text()[-3000:], sep="\n", file=sys.stderr)
            raise


def measure(services: Services, count: int, began: float) -> int:
    servers = [services.start(name) for name in ("prefect", "mlflow")]
    for name in ("prefect", "mlflow"):
        services.healthy(name)
    assert services.start("deploy").wait(1800) == 0
    servers.append(services.start("worker"))
    print(f"services: {time.monotonic() - began:.0f} s", flush=True)
    deployment = services.request("deployments/name/finetune/tiny")
    services.request(f"deployments/{deployment['id']}", {"concurrency_limit": count}, "PATCH")
    done, began = threading.Event(), time.monotonic()
    threading.Thread(target=services.sample, args=(done,), daemon=True).start()
    runs = [_submit(services, deployment["id"], number) for number in range(count)]
    print(f"{count} flows submitted in {time.monotonic() - began:.1f} s", flush=True)
    killed = _kill(services)
    ended = _ended(services, runs)
    whole = time.monotonic() - began
    done.set()
    problems = _check(services, ended, killed)
    _report(services, ended, whole, problems)
    for server in reversed(servers):
        server.terminate()
        server.wait(120)
    return int(bool(problems))


def _submit(services: Services, deployment: str, number: int) -> str:
    changes = CHANGES | {"optimizer": {"lr": (number % TRAININGS + 1) * 1e-3}}
    body = {"parameters": {"conf": "tiny", "changes": changes, "until_stage": "export"}, "state": {"type": "SCHEDULED"}}
    return services.request(f"deployments/{deployment}/create_flow_run", body)["id"]


def _kill(services: Services) -> list[str]:
    """Kill the processes of flows that train, after a checkpoint. Return the ids of the flows."""
    killed: list[str] = []
    for _ in range(KILLED):
        flow, process = wait_for(lambda: next(((f, p) for f, p in _training() if f not in killed), None), WITHIN)
        process.kill()
        killed.append(flow)
        print(f"{time.strftime('%H:%M:%S')} killed flow {flow} in its training", flush=True)
    return killed


def _training() -> Iterator[tuple[str, psutil.Process]]:
    """Flows with a training that has saved a checkpoint, and their processes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, StopIteration):
            command = process.cmdline()
            if "trainer.train" not in command or process.environ().get(MARK) != os.environ[MARK]:
                continue
            folder = Path(command[-1]).parent
            steps = [line for file in folder.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
            flow = next(one for one in process.parents() if one.cmdline()[1:3] == ["-m", "prefect.engine"])
            if sum('"train"' in line for line in steps) > SAVED:
                yield flow.environ()["PREFECT__FLOW_RUN_ID"], flow


def _ended(services: Services, runs: list[str]) -> list[dict]:
    final = {"Completed", "Failed", "Cancelled"}
    shown: Counter = Counter()

    def all_ended() -> list[dict]:
        nonlocal shown
        found = services.request("flow_runs/filter", {"flow_runs": {"id": {"any_": runs}}, "limit": 200})
        if (states := Counter(run["state_name"] for run in found)) != shown:
            print(f"{time.strftime('%H:%M:%S')} {dict(states)} load {os.getloadavg()[0]:.0f}", flush=True)
            shown = states
        time.sleep(3)
        return found if all(run["state_name"] in final for run in found) else []

    return wait_for(all_ended, WITHIN)


def _tasks(services: Services, run: str) -> list[tuple[str, str]]:
    """Return stage and state of all tasks of a flow, in the order of their starts. A restarted flow has new tasks."""
    tasks = services.request("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}, "limit": 200})
    tasks.sort(key=lambda task: task["start_time"] or "")
    return [(task["name"], task["state_name"]) for task in tasks]


def _check(services: Services, ended: list[dict], killed: list[str]) -> list[str]:
    """List everything that is wrong."""
    problems = [f"{run['name']}: {run['state_name']}" for run in ended if run["state_name"] != "Completed"]
    tasks = {run["id"]: _tasks(services, run["id"]) for run in ended}
    stages = services.stages = Counter(task for run in tasks.values() for task in run)
    states = {run: dict(of_run) for run, of_run in tasks.items()}  # the last ones
    for stage, count in {**dict.fromkeys(SHARED, 1), **dict.fromkeys(OWN, TRAININGS)}.items():
        if stages[stage, "Completed"] != count:
            problems.append(f"{stage}: made {stages[stage, 'Completed']} times")
    for stage in OWN:
        if any(run.get(stage) not in ("Completed", "Cached") for run in states.values()):
            problems.append(f"{stage}: not in all flows")
    for run in ended:
        if run["id"] in killed and run["run_count"] < 2:
            problems.append(f"{run['name']}: was killed, and did not run again")
        if run["id"] in killed and any(states[run["id"]].get(stage) != "Cached" for stage in SHARED):
            problems.append(f"{run['name']}: has repeated a finished stage: {states[run['id']]}")
    problems += [] if len(killed) == KILLED else [f"{len(killed)} flows were killed"]
    environment = services.environment("worker") | {
        path.name: path.read_text() for path in (services.folder / "worker/secrets").iterdir()
    }
    verify = subprocess.run(
        [sys.executable, "-m", "flows.artifacts", "verify"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    services.verified = (verify.stdout.strip().splitlines() or [""])[-1]
    if verify.returncode:
        problems.append(f"flows.artifacts verify: {verify.stdout}{verify.stderr}")
    return problems + _check_mlflow(services)


def _check_mlflow(services: Services) -> list[str]:
    from mlflow import MlflowClient

    client, problems = MlflowClient(services.mlflow), []
    trainings = client.search_runs(["1"], "tags.finetune.stage = 'train'")
    if len(trainings) != TRAININGS:
        problems.append(f"MLflow has {len(trainings)} trainings")
    for run in trainings:
        history = client.get_metric_history(run.info.run_id, "loss/training")
        if sorted(metric.step for metric in history) != list(range(1, STEPS + 1)):
            problems.append(f"MLflow: steps {[metric.step for metric in history]}")
        losses = [metric.value for metric in sorted(history, key=lambda metric: metric.step)]
        if run.info.status != "FINISHED" or not losses[-1] < losses[0]:
            problems.append(
                f"MLflow: {run.info.run_name} is {run.info.status}, loss {losses[0]:.3f} to {losses[-1]:.3f}"
            )
    return problems


def _report(services: Services, ended: list[dict], whole: float, problems: list[str]) -> None:
    seconds = sorted(run["total_run_time"] for run in ended)
    cached = sum(count for (_, state), count in services.stages.items() if state == "Cached")
    logs = {name: (services.folder / f"{name}.log").read_text() for name in ("postgres", "prefect", "mlflow", "worker")}
    errors = {name: len(re.findall(r"\bERROR\b|\bFATAL\b|Traceback", text)) for name, text in logs.items()}
    query = (
        "select datname, xact_commit, xact_rollback, deadlocks from pg_stat_database where datname ~ 'prefect|mlflow'"
    )
    rows = [
        ("all flows", f"{whole:.0f} s"),
        (
            "a flow: shortest, median, longest",
            f"{seconds[0]:.0f}, {statistics.median(seconds):.0f}, {seconds[-1]:.0f} s",
        ),
    ]
    rows += [("completed", f"{sum(run['state_name'] == 'Completed' for run in ended)} of {len(ended)}")]
    rows += [("restarted", str(sum(run["run_count"] > 1 for run in ended)))]
    rows += [
        (
            "stages made, cached",
            f"{sum(count for (_, state), count in services.stages.items() if state == 'Completed')}, {cached}",
        )
    ]
    for line in services.ask(query).split():
        name, commits, rollbacks, deadlocks = line.split("|")
        rows.append(
            (
                f"database {name}",
                f"{services.peak[name]} connections at most, {commits} transactions, {rollbacks} rolled back, "
                f"{deadlocks} deadlocks",
            )
        )
    rows.append(("errors in logs", ", ".join(f"{name} {count}" for name, count in errors.items())))
    rows.append(("store", services.verified))
    print("", "|  |  |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), sep="\n")
    for name, text in logs.items():
        for line in [line for line in text.splitlines() if re.search(r"\bERROR\b|\bFATAL\b", line)][:5]:
            print(f"{name}: {line[:300]}")
    print(*(f"problem: {problem}" for problem in problems), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
