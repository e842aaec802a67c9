"""Engine for Slurm: one job for all hosts, in which one srun starts a member on each host.

    python -m flows.gang NAME --engine slurm        prints the script

Slurm gives a job all its hosts or none, queues it and ends it by its rules. Gangs therefore need neither turns nor a
count of free hosts. The flow runs on a host with sbatch, for example as a worker on a login host.

The script's options have these purposes. A failed host or an ended member does not end the others (--no-kill,
--kill-on-bad-exit=0), as the controller stops them after it has found the cause. Slurm never restarts a job
(--no-requeue), as the controller starts new attempts. Before the time limit, a signal makes training save a checkpoint
(--signal). When a job ends, even if srun is killed, its members' standard input closes and slurmd kills their
processes. After scancel that takes at most KillWait (30 s by default), which is also the limit for a save.

NeMo-Run 0.11's SlurmExecutor is not used: its script contains the values of variables, including secrets, ends all
tasks with the first one and gives them no standard input; its 110 packages cannot be imported with the newest leptonai
that they require. Only the #SBATCH lines could be shared.

Not covered: arrays and heterogeneous jobs, requests by GPU instead of by host.
"""

# pyright: reportArgumentType=false

import re
import shlex
import sys
from pathlib import Path

from jinja2 import Template

from conf.schema.clusters import Slurm
from contract.faults import Fault
from contract.files import last_lines
from tasks.gang.board import Board
from tasks.gang.engines import Demand, client, grace, guarded, spared
from tasks.gang.engines.client import Polled, State
from tasks.run.launch import ROOT

TEMPLATE = Path(__file__).with_name("job.sh.j2").read_text("utf-8")
SCRIPT = Template(TEMPLATE, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
LEAVE_WITHIN = 60.0  # KillWait and the time that slurmd needs to clean up
WAITING = ("PENDING", "CONFIGURING", "REQUEUED")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
# Answers of sbatch after which a later try may succeed.
AWAY = re.compile(r"[Uu]nable to contact|timed out|[Cc]onnection|temporar|try again|no answer|Zero Bytes|protocol")
QUEUED = re.compile(r"not available now|[Rr]esources temporarily|currently (?:busy|not available)")
SLURM_LINE = re.compile(r"^(?:\d+: )?(?:slurmstepd[\w.-]*|srun): .*(?:CANCELLED|oom|[Ff]ail|[Kk]illed|[Oo]ut [Oo]f)")
# sinfo's states of nodes that are up or can be started, used or not. The suffix * means no answer, $ maintenance.
USABLE = re.compile(r"(idle|alloc|mix|comp|plnd|resv)[~#%@^+-]?$")
TAIL = 1 << 16  # last bytes of the job's output, which are searched for Slurm's lines


class Job(Polled):
    """One job of n members. Slurm knows the state of the job only; the state of each member is on the board."""

    def __init__(self, id: str, n: int, log: Path):
        self.id, self.log = id, log
        super().__init__(n, self._look)

    def words(self) -> tuple[str, ...]:
        return slurm_lines(self.log)

    def cancel(self) -> None:
        if self.alive()[0] is not False:
            client.run(["scancel", self.id])
        self.wait_for_end(LEAVE_WITHIN)

    def _look(self) -> State | None:
        result = client.run(["squeue", "--noheader", "--states=all", "--jobs", self.id, "--format=%T|%r"])
        if result.code and "Invalid job id" not in result.error:
            return None
        state, _, reason = result.output.strip().partition("|")  # Slurm forgets a job some time after its end
        alive = dict.fromkeys(range(self.n), state in WAITING + ALIVE)
        why = "not considered yet" if reason == "None" else reason
        return State(alive, f"Slurm's job {self.id} is pending: {why}" if state in WAITING else None)


def turn(demand: Demand) -> str | None:
    return None


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    """Raise a Fault if such a job is impossible. The queue decides when a possible one runs."""
    result = client.run(["sbatch", "--test-only", *options(demand, "test"), "--wrap=true"])
    if result.code == 0 or QUEUED.search(result.line):
        return None
    if AWAY.search(result.line):
        return f"Slurm does not answer ({result.line})"
    n, partitions = demand.nodes, _hosts(demand.slurm.partition) or []
    if any(len(hosts) >= n > sum(hosts.values()) for hosts in partitions):  # sbatch reports the same error for it
        up = max(sum(hosts.values()) for hosts in partitions)
        return f"{n} of Slurm's; {up} {'is' if up == 1 else 'are'} neither down nor drained"
    raise Fault(f"slurm: {result.line}")


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    """Number of usable hosts in the largest partition. slurm.constraint is ignored."""
    partitions = _hosts(demand.slurm.partition)
    if partitions is None:
        return None
    return max((sum(up for host, up in hosts.items() if host not in without) for hosts in partitions), default=None)


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Job:
    Path(demand.logs).mkdir(parents=True, exist_ok=True)
    client.run(["scancel", "--me", f"--name={demand.name}-{board.gang}"])  # of a controller that died

    def enough(out: tuple[str, ...]) -> bool:
        return not client.run(["sbatch", "--test-only", *options(demand, "test"), *_but(out), "--wrap=true"]).code

    excluded = spared(without, enough)  # Slurm itself avoids hosts that are down
    result = client.run(["sbatch", "--parsable", *_but(excluded)], submission(demand, board))
    if result.code:
        raise (ConnectionError if AWAY.search(result.line) else Fault)(f"slurm: {result.line}")
    id = result.output.strip().partition(";")[0]  # with several clusters, the cluster's name follows
    return Job(id, n, Path(str(_log(demand.logs)).replace("%j", id)))


def _but(out: tuple[str, ...]) -> list[str]:
    return [f"--exclude={','.join(out)}"] if out else []


def options(demand: Demand, gang: str) -> list[str]:
    """Options of sbatch, in the order of the script."""
    slurm = demand.slurm
    words = [f"--job-name={demand.name}-{gang}", f"--nodes={demand.nodes}", "--ntasks-per-node=1"]
    if slurm.gpus != "none":
        words.append(f"{slurm.gpus}{demand.gpus_per_node}")
    if slurm.exclusive:
        words += ["--exclusive", "--mem=0"]
    for key in ("partition", "account", "qos", "time", "constraint"):
        if value := getattr(slurm, key):
            words.append(f"--{key}={value}")
    if slurm.time:
        words.append(f"--signal=TERM@{grace(demand.gang) + 60}")  # it may come 60 s early (manual of sbatch)
    words += ["--no-requeue", "--no-kill", f"--export={','.join(slurm.export) or 'NONE'}"]
    words += [f"--chdir={_folder(slurm)}" if not slurm.image else "--chdir=/", f"--output={_log(demand.logs)}"]
    return [*words, "--open-mode=append", *slurm.options]


def slurm_lines(log: Path) -> tuple[str, ...]:
    """Slurm's lines in the job's output, on how members ended."""
    return tuple(line for line in last_lines(log, TAIL) if SLURM_LINE.match(line))


def submission(demand: Demand, board: Board) -> str:
    """The batch script, from the template job.sh.j2."""
    slurm = demand.slurm
    container = []
    if slurm.image:
        mounts = [f"--container-mounts={','.join(slurm.mounts)}"] if slurm.mounts else []
        container = [f"--container-image={slurm.image}", *mounts, f"--container-workdir={_folder(slurm)}"]
    member = shlex.join(guarded(demand.gang, board, "", slurm.python or sys.executable)[:-1])
    return SCRIPT.render(
        # In #SBATCH lines Slurm interprets quotes and nothing else.
        options=[f'"{option}"' if re.search(r"\s", option) else option for option in options(demand, board.gang)],
        setup=slurm.setup,
        container=f" {shlex.join(container)}" if container else "",
        member=shlex.quote(f'GANG_HOST="$SLURMD_NODENAME" exec {member} "$SLURM_NODEID"'),
    )


def _hosts(name: str | None) -> list[dict[str, bool]] | None:
    """For each of the named or default partitions, its hosts and whether each is usable; None if sinfo fails."""
    only = [f"--partition={name}"] if name else []
    result = client.run(["sinfo", "--noheader", "--Node", "--format=%P|%N|%t", *only])
    partitions: dict[str, dict[str, bool]] = {}
    for partition, host, state in (line.split("|") for line in result.output.splitlines()):
        if only or partition.endswith("*"):  # the default one
            partitions.setdefault(partition, {})[host] = USABLE.match(state) is not None
    return None if result.code else [*partitions.values()]


def _log(logs: str) -> Path:
    return Path(logs) / "slurm-%j.log"


def _folder(slurm: Slurm) -> str:
    return slurm.folder or str(ROOT)
