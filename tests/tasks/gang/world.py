"""Hosts as network namespaces of this machine, each with an address and a Prefect worker of its own; and their store.

    with world(folder, hosts=3) as made: made.flow("--until", "train") ...

A bridge joins them; this machine is 10.213.0.1 on it, with Prefect's server and S3. What can happen to hosts is a
method each. Temporary files are on a disk of each host's own. FINETUNE_RUNS is one folder of all, or with `apart` on
these disks too, which are then larger. Needs root and ip (iproute2).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support import s3_server
from tests.support.flow_world import end, wait_for

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
POOL = "finetune-nodes"
TORCHRUNS = {"trainer.startup.torchrun", "trainer.startup.torchrun_ahead"}  # modules; ranks are their children
NET = "10.213.0"
BRIDGE = "gangbr"
NEWEST = 100  # lines of metrics that have the current step
DISK = 64 << 20  # bytes of a host's own disk
DISK_APART = 256 << 20
CONF = """
name: hosts
model: {source: "tiny://glm4-moe"}
data: {source: "tiny://tickets", seq_length: 64, validation: 0.04, test: 0.04}
adapter: {rank: 16, alpha: 32}
train: {steps: 40, global_batch: 24, micro_batch: 4, precision: fp32}
optimizer: {lr: 1e-3, warmup_steps: 5}
checkpoint: {save_every: 10}
gang: {engine: prefect, start_within: 60, stall_seconds: 20}
"""


def missing() -> str:
    """Why there can be no such world here; empty where there can."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root, and ip of iproute2"
    made = ip("netns", "add", "gangprobe", check=False)
    ip("netns", "del", "gangprobe", check=False)
    return f"no network namespaces here: {made.stderr}" if made.returncode else ""


@dataclass
class World:
    folder: Path
    environment: dict[str, str]
    servers: dict[str, psutil.Process] = field(default_factory=dict)
    workers: dict[int, subprocess.Popen] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    running: Any = None  # the flow under way
    apart: bool = False

    def join(self, host: int) -> None:
        """A host of its own address, with a worker."""
        name, address = f"gang{host}", f"{NET}.{host + 10}/24"
        ip("link", "del", f"gv{host}", check=False)  # of a host that was removed
        ip("netns", "del", name, check=False)
        ip("netns", "add", name)
        ip("link", "add", f"gv{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"gv{host}", "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", address, "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        self.disk(host).mkdir(exist_ok=True)
        if not self.disk(host).is_mount():
            size = DISK_APART if self.apart else DISK
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.disk(host)]
            subprocess.run(mount, check=True)
            self.stack.callback(subprocess.run, ["umount", "--lazy", self.disk(host)])
        self.work(host)

    def work(self, host: int) -> None:
        command = [BIN / "prefect", "worker", "start", "--pool", POOL, "--limit", "1", "--name", f"host{host}"]
        if self.apart:  # ip netns gives its command a mount namespace
            self.runs(host).mkdir(exist_ok=True)
            bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
            command = ["sh", "-c", bind, self.runs(host), self.environment["FINETUNE_RUNS"], *command]
        with (self.folder / f"worker{host}.log").open("a") as log:
            self.workers[host] = subprocess.Popen(
                ["ip", "netns", "exec", f"gang{host}", *command],
                cwd=ROOT,
                env=self.environment | {"TMPDIR": str(self.disk(host))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def disk(self, host: int) -> Path:
        return self.folder / f"disk{host}"

    def runs(self, host: int) -> Path:
        """FINETUNE_RUNS of a host."""
        return self.disk(host) / "runs" if self.apart else Path(self.environment["FINETUNE_RUNS"])

    def fill(self, host: int) -> None:
        """To the last byte."""
        with contextlib.suppress(OSError), (self.disk(host) / "full").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass

    def empty(self, host: int) -> None:
        (self.disk(host) / "full").unlink()

    def cut(self, host: int) -> None:
        ip("link", "set", f"gv{host}", "down")

    def heal(self, host: int) -> None:
        ip("link", "set", f"gv{host}", "up")

    def processes(self, host: int) -> list[psutil.Process]:
        pids = ip("netns", "pids", f"gang{host}", check=False).stdout.split()
        return [p for pid in pids if (p := _process(int(pid)))]

    def kill_host(self, host: int) -> None:
        """Power off: everything of it is gone at once, and its link is down."""
        self.cut(host)
        while found := self.processes(host):
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self.workers.pop(host).wait()

    def lose_host(self, host: int) -> None:
        """As kill_host(); nothing of its disk comes back."""
        self.kill_host(host)
        for path in self.disk(host).iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def members(self, host: int) -> list[psutil.Process]:
        return [
            p for p in self.processes(host) if "tasks.gang.member" in _line(p) and "tasks.run.guard" not in _line(p)
        ]

    def ranks(self, host: int) -> list[psutil.Process]:
        """Children of torchrun, which may be its forks."""
        found = {p.pid: p for p in self.processes(host)}
        torchruns = {pid for pid, p in found.items() if TORCHRUNS & {*_line(p)}}
        return [p for p in found.values() if _parent(p) in torchruns]

    def attempt(self) -> list[psutil.Process]:
        """Ranks and their torchrun on every host; members may stay for the next attempt."""
        ranks = [rank for host in self.workers for rank in self.ranks(host)]
        torchruns = {parent: psutil.Process(parent) for rank in ranks if (parent := _parent(rank))}
        return [*ranks, *torchruns.values()]

    def training(self) -> list[psutil.Process]:
        """Every process of every gang on every host: what may not outlive it."""
        marks = {"tasks.gang.member", "trainer.train"} | TORCHRUNS
        return [p for host in self.workers for p in self.processes(host) if marks & {*_line(p)}]

    def flow(self, *arguments: str, **environment: str) -> subprocess.Popen:
        """python -m flows.finetune, on this machine, to <folder>/flow.log."""
        with (self.folder / "flow.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.finetune", str(self.folder / "hosts.yaml"), *arguments],
                cwd=ROOT,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def prefect(self, *arguments: str) -> None:
        command = [BIN / "prefect", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def serve(self) -> None:
        """Prefect's server, on the same port and data each time."""
        port = self.environment["PREFECT_API_URL"].rpartition(":")[2].partition("/")[0]
        with (self.folder / "prefect.log").open("a") as log:
            server = subprocess.Popen(
                [BIN / "prefect", "server", "start", "--host", f"{NET}.1", "--port", port],
                cwd=self.folder,
                env={**self.environment, "PREFECT_API_URL": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.servers["prefect"] = psutil.Process(server.pid)
        self.stack.callback(end, server)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.environment['PREFECT_API_URL']}/health", timeout=5).close()
                return True
            return False

        wait_for(answers, 120)

    def lines(self, newest: int = 0) -> list[dict]:
        """Of the metrics of the training under way, or of the one that ended last; only the newest, or all."""
        runs = Path(self.environment["FINETUNE_RUNS"])
        for path in runs.glob("work/train-*/files/metrics.jsonl"):
            with contextlib.suppress(OSError, ValueError):
                return [json.loads(line) for line in path.read_text().splitlines()[-newest:]]
        return []

    def step(self) -> int:
        return max((line["step"] for line in self.lines(NEWEST) if line["kind"] == "train"), default=0)


@contextlib.contextmanager
def world(folder: Path, hosts: int, apart: bool = False) -> Iterator[World]:
    clean()
    with contextlib.ExitStack() as stack:
        workers: dict[int, subprocess.Popen] = {}
        stack.callback(lambda: [worker.wait() for worker in workers.values()])
        stack.callback(clean)
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        endpoint, s3 = stack.enter_context(s3_server.running(f"{NET}.1"))
        environment = os.environ | s3_server.ENVIRONMENT
        environment |= {
            "AWS_ENDPOINT_URL": endpoint,
            "FINETUNE_STORE": "s3://finetune/main",
            "FINETUNE_RUNS": str(folder / "runs"),
            "PREFECT_API_URL": f"http://{NET}.1:4217/api",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "NO_COLOR": "1",
        }
        (folder / "runs").mkdir(exist_ok=True)
        made = World(folder, environment, workers=workers, stack=stack, apart=apart)
        made.servers["s3"] = psutil.Process(s3)
        stack.callback(_resume, made.servers["s3"])
        s3_server.make_bucket(environment)
        made.serve()
        made.prefect("work-pool", "create", POOL, "--type", "process")
        made.prefect("--no-prompt", "deploy", "--name", POOL)
        (folder / "hosts.yaml").write_text(CONF)
        for host in range(hosts):
            made.join(host)
        yield made


def clean() -> None:
    """Also what a test that was killed has left: its names are nobody else's."""
    for line in ip("netns", "list", check=False).stdout.splitlines():
        name = line.split()[0]
        if name.startswith("gang"):
            for pid in ip("netns", "pids", name, check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name, check=False)
            ip("link", "del", f"gv{name.removeprefix('gang')}", check=False)
    ip("link", "del", BRIDGE, check=False)


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.resume()


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return None


def _line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
