"""Engine for Slurm: one job of all hosts with one srun in it, which starts a member on each of them.

    python -m flows.gang NAME --engine slurm        prints the script

It is for clusters that have Slurm. Slurm gives a job all its hosts or none, queues it, and takes it back by its own
rules, so that gangs need no turns and no count of free hosts. The flow runs where sbatch is, as a worker on a login
host.

The script's options have these purposes. A host that fails, or a member that ends, does not end the others (--no-kill,
--kill-on-bad-exit=0), as the controller stops them once it knows why. Slurm never begins a job again (--no-requeue), as
attempts are the controller's. Before the time limit, training is told to save (--signal). Slurm ends what is left of a
job, also when srun is killed: its members' standard input closes, and slurmd kills what it started. After scancel that
takes KillWait (30 s by default) at most, and a save has no longer than that.

NeMo-Run 0.11's SlurmExecutor is not used: its script holds the values of variables, secrets among them, ends all tasks
with the first and gives them no standard input; its 110 packages cannot be imported with the newest leptonai that they
ask for. Only #SBATCH lines would be left to share.

Not covered: arrays and heterogeneous jobs, requests by GPU instead of by host.
"""

# pyright: reportArgumentType=false

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from conf.schema.clusters import Slurm
from contract.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import Demand, client, grace, guarded, spared
from tasks.gang.engines.client import Asked, State
from tasks.run.launch import ROOT

LEAVE_WITHIN = 60.0  # KillWait, and what slurmd needs to clean up
WAITING = ("PENDING", "CONFIGURING", "REQUEUED")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
# Answers of sbatch after which a later try may succeed.
AWAY = re.compile(r"[Uu]nable to contact|timed out|[Cc]onnection|temporar|try again|no answer|Zero Bytes|protocol")
QUEUED = re.compile(r"not available now|[Rr]esources temporarily|currently (?:busy|not available)")
SAID = re.compile(r"^(?:\d+: )?(?:slurmstepd[\w.-]*|srun): .*(?:CANCELLED|oom|[Ff]ail|[Kk]illed|[Oo]ut [Oo]f)")
# sinfo's states of nodes that are there or can be, whoever uses them; behind them * is no answer, $ maintenance
USABLE = re.compile(r"(idle|alloc|mix|comp|plnd|resv)[~#%@^+-]?$")
TAIL = 1 << 16  # bytes of the job's output in which Slurm's own lines are looked for


class Job:
    """One job of n members. Only the board knows the state of each member."""

    def __init__(self, id: str, n: int, log: Path):
        self.id, self.n, self.log = id, n, log
        self._asked = Asked(n, self._look)

    def alive(self) -> dict[int, bool | None]:
        return self._asked.state.alive

    def waits(self) -> str | None:
        return self._asked.state.waits

    def words(self) -> tuple[str, ...]:
        return said(self.log)

    def cancel(self) -> None:
        if not self._is_over(self._asked.state):
            client.run(["scancel", self.id])
            self._asked.wait(LEAVE_WITHIN, self._is_over)
        self._asked.end()

    def _is_over(self, state: State) -> bool:
        return state.alive[0] is False

    def _look(self) -> State | None:
        found = client.run(["squeue", "--noheader", "--states=all", "--jobs", self.id, "--format=%T|%r"])
        if found.code and "Invalid job id" not in found.error:
            return None
        state, _, reason = found.output.strip().partition("|")  # a job that is long over is not known any more
        alive = dict.fromkeys(range(self.n), state in WAITING + ALIVE)
        why = "not looked at yet" if reason == "None" else reason
        return State(alive, f"Slurm's job {self.id} is pending: {why}" if state in WAITING else None)


def turn(demand: Demand) -> str | None:
    return None


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    """Raise a Fault where such a job is impossible. The queue decides when a possible one runs."""
    tried = client.run(["sbatch", "--test-only", *options(demand, "test"), "--wrap=true"])
    if tried.code == 0 or QUEUED.search(tried.line):
        return None
    if AWAY.search(tried.line):
        return f"Slurm does not answer ({tried.line})"
    n, there = demand.nodes, _hosts(demand.slurm.partition) or []
    if any(len(hosts) >= n > sum(hosts.values()) for hosts in there):  # for sbatch that is no other fault
        up = max(sum(hosts.values()) for hosts in there)
        return f"{n} of Slurm's, of which {up} {'is' if up == 1 else 'are'} neither down nor drained"
    raise Fault(f"slurm: {tried.line}")


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    """Number of hosts of the partition that has the most. Features that slurm.constraint asks for are not looked at."""
    there = _hosts(demand.slurm.partition)
    if there is None:
        return None
    return max((sum(up for host, up in hosts.items() if host not in without) for hosts in there), default=None)


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Job:
    assert n == demand.nodes
    Path(demand.logs).mkdir(parents=True, exist_ok=True)
    client.run(["scancel", "--me", f"--name={demand.name}-{board.gang}"])  # of an earlier controller that is gone

    def enough(out: tuple[str, ...]) -> bool:
        return not client.run(["sbatch", "--test-only", *options(demand, "test"), *_but(out), "--wrap=true"]).code

    others = spared(without, enough)  # where there are none, Slurm itself knows of those that are down
    made = client.run(["sbatch", "--parsable", *_but(others)], script(demand, board))
    if made.code:
        raise (ConnectionError if AWAY.search(made.line) else Fault)(f"slurm: {made.line}")
    id = made.output.strip().partition(";")[0]  # the cluster's name follows where there are several
    return Job(id, n, Path(str(_log(demand.logs)).replace("%j", id)))


def _but(out: tuple[str, ...]) -> list[str]:
    return [f"--exclude={','.join(out)}"] if out else []


def options(demand: Demand, gang: str) -> list[str]:
    """Options of sbatch, in the order of the script."""
    slurm = demand.slurm
    found = [f"--job-name={demand.name}-{gang}", f"--nodes={demand.nodes}", "--ntasks-per-node=1"]
    if slurm.gpus != "none":
        found.append(f"{slurm.gpus}{demand.gpus_per_node}")
    if slurm.exclusive:
        found += ["--exclusive", "--mem=0"]
    for key in ("partition", "account", "qos", "time", "constraint"):
        if value := getattr(slurm, key):
            found.append(f"--{key}={value}")
    if slurm.time:
        found.append(f"--signal=TERM@{grace(demand.gang) + 60}")  # may come 60 s early, by sbatch's manual
    found += ["--no-requeue", "--no-kill", f"--export={','.join(slurm.export) or 'NONE'}"]
    found += [f"--chdir={_folder(slurm)}" if not slurm.image else "--chdir=/", f"--output={_log(demand.logs)}"]
    return [*found, "--open-mode=append", *slurm.options]


def said(log: Path) -> tuple[str, ...]:
    """Lines of Slurm itself on how members ended, among all that the job has written."""
    if not log.exists():
        return ()
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    return tuple(line for line in lines if SAID.match(line))


def script(demand: Demand, board: Board) -> str:
    return "\n".join(_script(demand, board)) + "\n"


def _hosts(named: str | None) -> list[dict[str, bool]] | None:
    """Hosts of the partition, or of the default ones: whether each is there, used or not. None where nobody knows."""
    asked = [f"--partition={named}"] if named else []
    found = client.run(["sinfo", "--noheader", "--Node", "--format=%P|%N|%t", *asked])
    partitions: dict[str, dict[str, bool]] = {}
    for partition, host, state in (line.split("|") for line in found.output.splitlines()):
        if asked or partition.endswith("*"):  # the default one
            partitions.setdefault(partition, {})[host] = USABLE.match(state) is not None
    return None if found.code else [*partitions.values()]


def _script(demand: Demand, board: Board) -> Iterator[str]:
    slurm, python = demand.slurm, demand.slurm.python or sys.executable
    yield "#!/bin/bash"
    yield from (f"#SBATCH {_quoted(option)}" for option in options(demand, board.gang))
    yield ""
    yield "# A member ends when its standard input does: nobody writes to this one, and it stays open while srun lives."
    yield 'held=$(mktemp -u) && mkfifo -m 600 "$held" && exec 0<>"$held" && rm "$held"'
    yield "export PYTHONUNBUFFERED=1"
    yield from slurm.setup
    starts = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--export=ALL", "--label"]
    if slurm.image:
        mounts = [f"--container-mounts={','.join(slurm.mounts)}"] if slurm.mounts else []
        starts += [f"--container-image={slurm.image}", *mounts, f"--container-workdir={_folder(slurm)}"]
    member = shlex.join(guarded(demand.gang, board, "", python)[:-1])
    line = f'GANG_HOST="$SLURMD_NODENAME" exec {member} "$SLURM_NODEID"'
    yield f"exec {shlex.join(starts)} \\"
    yield f"    bash -c {shlex.quote(line)}"


def _quoted(option: str) -> str:
    """An option, in quotes where it holds a blank. Slurm reads quotes here, and leaves everything else as it is."""
    return f'"{option}"' if re.search(r"\s", option) else option


def _log(logs: str) -> Path:
    return Path(logs) / "slurm-%j.log"


def _folder(slurm: Slurm) -> str:
    return slurm.folder or str(ROOT)
