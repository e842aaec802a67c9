"""A Slurm whose nodes are processes of this host: sbatch, srun, squeue and scancel, by the name of the first argument.

It keeps the one job that there is in TOY_SLURM: script.sh, and pid of what runs it. Nobody waits in its queue.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from contract.processes import state

JOB = "7"


def main() -> int:
    program, *arguments = sys.argv[1:]
    return {"sbatch": sbatch, "srun": srun, "squeue": squeue, "scancel": scancel}[program](arguments)


def sbatch(arguments: list[str]) -> int:
    if "--test-only" in arguments:
        return 0
    text = sys.stdin.read()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    (folder() / "script.sh").write_text(text)
    with Path(asked["output"].replace("%j", JOB)).open("a") as output:
        running = subprocess.Popen(
            ["bash", folder() / "script.sh"],
            cwd=asked["chdir"],
            env=os.environ | {"TOY_NODES": asked["nodes"]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (folder() / "pid").write_text(str(running.pid))
    print(JOB)
    return 0


def srun(arguments: list[str]) -> int:
    command = arguments[arguments.index("bash") :]
    nodes = [{"SLURM_NODEID": str(k), "SLURMD_NODENAME": f"n{k}"} for k in range(int(os.environ["TOY_NODES"]))]
    tasks = [subprocess.Popen(command, env=os.environ | node) for node in nodes]
    return max(task.wait() for task in tasks)


def squeue(arguments: list[str]) -> int:
    over = state(int((folder() / "pid").read_text())) in ("", "Z")
    print(f"{'COMPLETED' if over else 'RUNNING'}|None")
    return 0


def scancel(arguments: list[str]) -> int:
    if JOB in arguments:
        with suppress(ProcessLookupError):
            os.killpg(int((folder() / "pid").read_text()), signal.SIGTERM)
    return 0


def folder() -> Path:
    return Path(os.environ["TOY_SLURM"])


if __name__ == "__main__":
    sys.exit(main())
