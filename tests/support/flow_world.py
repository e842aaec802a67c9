"""Servers that a flow talks to, on this host and on free ports: Prefect, MLflow, S3. Their secrets carry a marker."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import s3_server

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARKER = "s3cr3t-marker"
SECRETS = {
    "HF_TOKEN": f"hf_{MARKER}",
    "AWS_SECRET_ACCESS_KEY": f"aws-{MARKER}",
    "AWS_SESSION_TOKEN": f"session-{MARKER}",
    "MLFLOW_TRACKING_USERNAME": "somebody",
    "MLFLOW_TRACKING_PASSWORD": f"mlflow-{MARKER}",
}
CONF = """
name: quick
model: {source: "tiny://glm4-moe"}
data: {source: "tiny://tickets", seq_length: 64, validation: 0.04, test: 0.04}
adapter: {rank: 16, alpha: 32}
train: {steps: 50, global_batch: 16, micro_batch: 16, precision: fp32, validate_every: 25, validate_batches: 1}
optimizer: {lr: 5e-3, warmup_steps: 5}
checkpoint: {save_every: 20}
evaluate: {max_tokens: 8}
"""


@dataclass(frozen=True)
class World:
    folder: Path
    environment: dict[str, str]
    prefect: str
    mlflow: str

    def name_of(self, output: str) -> str:
        """Name of the flow run that printed this."""
        return output.partition("Flow run '")[2].partition("'")[0]

    @property
    def conf(self) -> Path:
        return self.folder / "quick.yaml"

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen:
        """Start python -m flows.finetune <the quick configuration> ..."""
        command = [sys.executable, "-m", "flows.finetune", str(self.conf), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=self.environment | environment, **pipes)

    def run(self, *arguments: object, code: int = 0, within: float = 540, **environment: str) -> str:
        """Run a flow to its end. Returns what it printed."""
        found, output = self.finish(*arguments, within=within, **environment)
        with (self.folder / "outputs.txt").open("a") as file:
            file.write(output)
        assert found == code, output
        return output

    def finish(self, *arguments: object, within: float, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output = process.communicate(timeout=within)[0]
        return process.returncode, output

    def ask_prefect(self, path: str, **body: object) -> list[dict]:
        """Answer of the server. It is asked again while it answers 503, as its database is busy."""
        request = urllib.request.Request(f"{self.prefect}/{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        until = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > until:
                    raise
            time.sleep(0.5)


def states(output: str) -> dict[str, str]:
    """State by stage, from the table that a run ends with."""
    table = output[output.rindex("\nstage ") :].split("\n\n")[0].splitlines()[2:]
    return {line.split()[0]: line.split()[1] for line in table}


def wait_for(condition: Callable, seconds: float = 60.0):
    """Wait for an answer of the condition, and return it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    raise TimeoutError


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        endpoint, _ = stack.enter_context(s3_server.running())
        environment = os.environ | s3_server.ENVIRONMENT | SECRETS
        environment |= {
            "AWS_ENDPOINT_URL": endpoint,
            "FINETUNE_STORE": "s3://finetune/main",
            "FINETUNE_RUNS": str(folder / "runs"),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "10",  # 60, unless told: tests wait for it
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "NO_COLOR": "1",
        }
        s3_server.make_bucket(environment)
        ports = [free_port(), free_port()]
        prefect, mlflow = f"http://127.0.0.1:{ports[0]}/api", f"http://127.0.0.1:{ports[1]}"
        page = {"PREFECT_SERVER_UI_API_URL": prefect}  # which the server's page asks; at 4200 unless told
        server = ["prefect", "server", "start", "--port", ports[0]]
        waits = [_serve(stack, folder, environment | page, f"{prefect}/health", *server)]
        kept = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/kept"]
        start = ["mlflow", "server", "--port", ports[1], "--workers", 1]
        waits += [_serve(stack, folder, environment, f"{mlflow}/health", *start, *kept)]
        for wait in waits:
            wait()
        servers = {"PREFECT_API_URL": prefect, "MLFLOW_TRACKING_URI": mlflow}
        made = World(folder, environment | servers, prefect, mlflow)
        made.conf.write_text(CONF)
        yield made


def _serve(
    stack: contextlib.ExitStack, folder: Path, environment: dict, health: str, command: str, *arguments
) -> Callable:
    """Start a server. Returns a function that waits until it answers, so that several can start side by side."""
    log = stack.enter_context((folder / f"{command}.log").open("w"))
    process = subprocess.Popen(
        [BIN / command, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    stack.callback(end, process)

    def wait() -> None:
        for _ in range(2400):
            try:
                return urllib.request.urlopen(health, timeout=5).close()
            except OSError:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
        raise TimeoutError(f"{command} does not start")

    return wait


def end(process: subprocess.Popen) -> None:
    """End the process and all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
