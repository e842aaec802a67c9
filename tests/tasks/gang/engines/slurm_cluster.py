"""A Slurm of its own on this host: Debian's munged, slurmctld, and a slurmd per node, all in one folder.

    with cluster(folder) as conf: ...     sbatch and the others find it by SLURM_CONF=conf

For root, as slurmd starts jobs for others. Nodes claim GPUs that are not there, so that Slurm weighs real requests. Not
covered: cgroups (a container has none to give), accounting, containers by pyxis.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES, GPUS = 4, 8
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
KillWait=10
PartitionName=h100 Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=n{k} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 Gres=gpu:{gpus}\n"


def missing() -> str:
    if os.geteuid() != 0:
        return "slurmd starts jobs for others: root only"
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    conf, running = _configure(folder), []
    environment = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = {name: folder / "munge" / name for name in ("socket", "pid-file", "log-file", "seed-file", "key-file")}
    munge["key-file"].write_bytes(os.urandom(128))
    munge["key-file"].chmod(0o400)
    commands = [["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in munge.items())]]
    commands += [["slurmctld", "-D", "-f", str(conf)]]
    commands += [["slurmd", "-D", "-f", str(conf), "-N", f"n{k}"] for k in range(1, NODES + 1)]
    try:
        for number, command in enumerate(commands):
            with (folder / f"{command[0]}.{number}.out").open("w") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            if command[0] == "munged":
                _wait_for(munge["socket"].exists)
        _wait_for(lambda: _of(environment, "sinfo", "-hN", "-o%T").split().count("idle") == NODES)
        yield conf
    finally:
        subprocess.run(["scancel", "--me"], env=environment, check=False)
        with contextlib.suppress(AssertionError):  # slurmd does not end before its jobs have
            _wait_for(lambda: not _of(environment, "squeue", "-h"))
        for process in reversed(running):
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _configure(folder: Path) -> Path:
    for name in ("munge", "state", "spool", *(f"spool/n{k}" for k in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True, mode=0o700)
    host, ports = socket.gethostname().partition(".")[0], _free_ports(NODES + 1)
    conf = folder / "slurm.conf"
    nodes = (NODE.format(k=k, host=host, port=ports[k], gpus=GPUS) for k in range(1, NODES + 1))
    conf.write_text("".join(nodes) + CONF.format(host=host, ports=ports, folder=folder))
    for gpu in range(GPUS):  # a GPU without a file is none
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    return conf


def _free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(n)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _of(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout


def _wait_for(so, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < until
        time.sleep(0.2)
