"""Ranks of one host: torchrun, the processes that it started, and the state of each of them.

A rank has failed if torchrun reports it, or if the rank wrote an error file before. It is silent if the thread that
writes its signs of life (trainer/startup/heartbeat.py) has stopped, and stalled if that thread writes but no step
completes. All times are this host's monotonic clock. Ranks always end with torchrun (trainer/startup/entry.py).
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from conf import network
from conf.host import nvidia_smi
from conf.schema.run import Run
from contract import json_object, signs_of_life
from contract.amounts import size
from contract.files import last_lines
from contract.processes import started, state
from tasks.gang import peer_probe
from tasks.gang.messages import End, Sign, Task, Word
from tasks.gang.torchrun import Torchrun
from tasks.run.launch import PRIVATE, ROOT

# Seconds without a sign of life, by the state of the process in /proc: a stopped process (T) stays stopped, a disk or
# driver (D) may answer late, and any other process may hold its interpreter for long, for example during an import.
SILENT = {"T": 6.0, "t": 6.0, "D": 20.0}
SILENT_ELSE = 60.0
DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# The key of `paths` that each command writes to.
WRITES = {"train": "output", "evaluate": "evaluation", "convert": "base", "reference": "reference"}
WRITES |= {"reinforce": "reinforced", "reinforcement.engines.guest": "reinforced"}
NO_SIGN = Sign(rank=-1, pid=0, step=0, phase="", age=0.0, idle=0.0, state="", silent=False, stalled=False)
SHOWN = 30  # last lines of a failed rank's log
LEAST = 1 << 20  # free bytes of this host's disk, below which neither signs of life nor logs are reliable
AFTER = 0.7  # seconds between a rank's death and the reading of all ranks' traces


class Ranks:
    """Ranks of the member at a `place` in their order, in the attempt `name`. `conf` is the resolved configuration."""

    def __init__(
        self,
        name: str,
        conf: Path,
        run: Run,
        task: Task,
        word: Word,
        place: int,
        address: str,
        folder: Path,
        torchrun: Torchrun,
    ):
        assert word.master, "the controller sets it before go"
        self.run, self.folder = run, folder
        helps = bool(task.helps) and place >= task.nodes
        module, self.count = (task.helps, task.helpers) if helps else (task.command, task.ranks)
        self.writes = Path(getattr(run.paths, WRITES[module]))
        self.alone = module == "evaluate"  # its ranks are independent, and torchrun would wait minutes for slower ones
        self.first = place * task.ranks
        self.shift = self.first if helps else 0  # ranks of a separate job number themselves from 0
        self.failed_at: float | None = None
        self._life().mkdir(parents=True)
        nodes, node = (1, 0) if helps else (task.nodes, place)
        command = network.meeting(nodes, node, *word.master)
        command += ["--nproc-per-node", str(self.count), "--rdzv-id", name]
        command += ["--log-dir", str(folder / "ranks"), "--redirects", "3"]
        command += ["-m", f"trainer.{module}", str(conf)]
        environment = environment_of(run, task, address) | {signs_of_life.FOLDER: str(self._life())}
        environment |= {"GANG_ATTEMPT": name, "TRAINER_FAULT_FILE": str(folder / "fault"), "GANG_KEY": word.key}
        self.log = folder / "torchrun.log"
        self.process = torchrun.start(command, environment, self.log)

    def look(self) -> str:
        """State of the ranks: running, done or failed.

        After the first death the state stays running for a moment, in which the other ranks write their errors.
        """
        code = self.process.poll()
        if code == 0 or (self.alone and any(sign.phase == signs_of_life.OVER for sign in self.signs())):
            return "done"
        dead = code is not None or self._full() or self._deaths() or list(self._life().glob(signs_of_life.error("*")))
        if dead and self.failed_at is None:
            self.failed_at = time.monotonic()
        if self.failed_at is not None:
            sure = -signal.SIGKILL in self._deaths().values()  # no trace of another rank explains it better
            return "failed" if sure or time.monotonic() - self.failed_at > AFTER else "running"
        return "failed" if any(sign.silent or sign.stalled for sign in self.signs()) else "running"

    @property
    def modules(self) -> Path:
        """File of the modules that ranks have imported; it exists after the first step."""
        return self._life() / signs_of_life.MODULES

    def signs(self) -> list[Sign]:
        """Activity of every rank that has begun, and the time since its last sign of life and step."""
        now, gang, signs = time.monotonic(), self.run.gang, []
        for path in sorted(self._life().glob(signs_of_life.sign("*"))):
            with contextlib.suppress(OSError, ValueError, KeyError):
                sign = json.loads(path.read_text())
                age, idle, kind = now - sign["at"], now - sign["step_at"], state(sign["pid"])
                longest = max(gang.stall_seconds, gang.stall_factor * sign["usual"])
                longest = longest if sign["phase"] in signs_of_life.MEASURED else gang.quiet_seconds
                alive = kind not in ("", "Z")
                silent = alive and age > SILENT.get(kind, SILENT_ELSE)
                signs.append(
                    Sign(
                        rank=self.shift + sign["rank"],
                        **{key: sign[key] for key in ("pid", "step", "phase")},
                        age=round(age, 1),
                        idle=round(idle, 1),
                        state=kind,
                        silent=silent,
                        stalled=alive and not silent and idle > longest,
                    )
                )
        return signs

    def post_mortem(self) -> list[End]:
        """Exit code, state and last lines of every rank."""
        deaths, signs = self._deaths(), {sign.rank: sign for sign in self.signs()}
        ends: list[End] = []
        for local in range(self.count):
            rank = self.first + local
            sign = signs.get(rank, NO_SIGN)
            error = json_object.read_or_empty(self._life() / signs_of_life.error(rank - self.shift))
            lines = self._tail(local)
            for line in error.get("lines", []):
                if line not in lines:
                    lines.append(line)
            code = deaths.get(local, 1 if error else None)
            if (self.folder / "fault").exists() and (error or code == 2):
                lines, code = (self.folder / "fault").read_text().splitlines(), 2
            ends.append(End(rank, code, sign.step, tuple(lines[-SHOWN:]), sign.silent, sign.state, sign.stalled))
        first = ends[0]
        if full := self._full():
            first = replace(first, lines=(full, *first.lines), code=first.code or 1)
        if not deaths and self.process.poll() not in (None, 0):  # torchrun itself
            last = self.log.read_text(errors="replace").splitlines()[-SHOWN:]
            first = replace(first, lines=(*first.lines, *last), code=first.code or self.process.returncode)
        return [first, *ends[1:]]

    def logs(self) -> dict[str, Path]:
        """Log files, by their names on the board."""
        files = {"torchrun.log": self.log}
        for path in sorted((self.folder / "ranks").rglob("std*.log")):
            if path.parent.name.isdigit():
                files[f"rank{self.first + int(path.parent.name):05d}.{path.stem[3:]}"] = path
        return files

    def end(self, grace: float) -> None:
        """End all ranks and wait for them. With grace, they may save a checkpoint first."""
        pids = {pid: started(pid) for sign in self.signs() if (pid := sign.pid)}
        if grace and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.process.kill()
        self.process.wait()
        until = time.monotonic() + 5
        while time.monotonic() < until and any(born and started(pid) == born for pid, born in pids.items()):
            for pid, born in pids.items():
                if born and started(pid) == born:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def free_disk(self) -> int:
        """Free bytes of the shared file system that the job writes to."""
        folder = self.writes
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _full(self) -> str:
        """Message if the disk of logs and signs of life is full, else empty."""
        free = shutil.disk_usage(self.folder).free
        return f"this host's own disk is full: {size(free)} free at {self.folder}" if free < LEAST else ""

    def _life(self) -> Path:
        return self.folder / "life"

    def _deaths(self) -> dict[int, int]:
        """Exit codes by local rank, as torchrun reports them, without the ranks that torchrun itself ended."""
        return {int(local): int(code) for code, local in DEATH.findall(self.log.read_text(errors="replace"))}

    def _tail(self, local: int) -> list[str]:
        lines = []
        for name in ("stdout.log", "stderr.log"):
            for path in (self.folder / "ranks").rglob(f"{local}/{name}"):
                lines += last_lines(path, 16384)[-SHOWN:]
        return lines


def environment_of(run: Run, task: Task, address: str) -> dict[str, str]:
    """Environment of the ranks on the host at this address, the same in each attempt."""
    environment = network.environment(run, nvidia_smi.kind())  # this host's variables take precedence
    environment |= {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "GANG_ADDRESS": address}
    environment |= {} if task.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {"VLLM_HOST_IP": address}  # otherwise vLLM looks for the route to the internet
    environment.setdefault("OMP_NUM_THREADS", "1")
    one_host = task.nodes == 1 and not task.helps
    if interface := "lo" if one_host else peer_probe.interface(address):
        environment = network.sockets(interface) | environment
    return environment
