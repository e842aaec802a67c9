"""Diagnosis of a failed attempt: one cause out of all that ranks and hosts left behind, and whether to try again.

    classify(Evidence(ranks=(Rank(0, "a", code=1, lines=("...",), order=7), ...), gone=("b",))) -> Failure

Of N ranks one has a cause, the others lost it. So a text that is a cause in itself comes before a death by a signal,
that before a host that is gone, that before ranks that hang, and connections that failed come last; the order in which
ranks died decides between equals only. tasks/gang/diagnosis/causes.py knows the texts,
tasks/gang/diagnosis/next_step.py what to do next.

    kind        for example                               retry
    user        configuration, environment, checkpoint    no: it would fail again
    memory      out of memory: GPU, host, /dev/shm        no: the plan says what to change
    data        a row that cannot be trained on           no: its place is named
    host        Xid, ECC, SIGKILL from outside, gone      yes, without it where it is to blame
    network     RDMA errors, hosts that do not meet       yes
    storage     disk full, file system gone               yes, without a host whose own disk is full
    preempted   the scheduler took a host                 yes
    hang        SIGSTOP, a rank that never came           yes
    unknown     all else, with the error's own line       yes, but not twice at the same step
"""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from tasks.gang.diagnosis.causes import ECHO, LINK, OWN, Cause, Kind, read

SURE: tuple[Kind, ...] = ("host", "memory")  # what the kernel knows better than any process
FULL = 10**9  # bytes free under which a disk counts as full; a checkpoint's smallest file is more
LONGEST = 200  # characters of an error's own line
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # torchrun ends ranks so once one has failed
# Python's way to say what ended it: "RuntimeError: ...", "torch.OutOfMemoryError: ..."; torch puts [rank1]: before, on
# a GPU twice.
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)*(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b.*")
PREFLIGHT = re.compile(r"preflight: node (?P<node>\d+), host .*?(?P<out>; to be left out)?$")
SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")


@dataclass(frozen=True)
class Rank:
    """Traces that one rank left behind before anybody stopped it."""

    rank: int
    host: str
    code: int | None = None  # exit code, negative = signal; None = alive
    step: int = 0
    lines: tuple[str, ...] = ()  # its error and the end of its log
    order: float = 0.0  # place among all reports, as the board has them; clocks of hosts are never compared
    silent: bool = False  # its thread of life says nothing
    state: str = ""  # of the process in /proc, as T or D


@dataclass(frozen=True)
class Evidence:
    ranks: tuple[Rank, ...] = ()
    gone: tuple[str, ...] = ()  # hosts that renew no longer
    kernel: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by host: lines of its kernel's log since go
    oom_kills: dict[str, int] = field(default_factory=dict)  # by host: of its cgroup's memory.events, since go
    free: dict[str, int] = field(default_factory=dict)  # by host: bytes of disk
    engine: tuple[str, ...] = ()  # what the engine says: reasons of pods, Slurm's lines
    stalled: bool = False  # all are alive and no step is made
    cancelled: bool = False  # a person asked for it


@dataclass(frozen=True)
class Failure:
    kind: Kind
    line: str  # for the user
    retry: bool
    host: str = ""
    rank: int | None = None
    step: int = 0
    blamed: tuple[str, ...] = ()  # hosts to leave out from now on


@dataclass(frozen=True)
class Reads:
    """Prepared data that training reads, a batch a step."""

    data: str
    batch: int

    def behind(self, step: int) -> str:
        """The samples of the step after this one."""
        first = step * self.batch
        return f"samples {first} to {first + self.batch - 1} of {self.data}, in training's order"


def classify(evidence: Evidence, reads: Reads | None = None) -> Failure:
    """Find the cause of a failed attempt. With `reads`, a data error's line names the samples of its step."""
    if evidence.cancelled:
        return Failure("user", "cancelled", False, step=_last_step(evidence))
    told = read(evidence.engine)
    if told and told.strength == OWN:
        return _of_host(told, _named(evidence, told.says), evidence)
    found = _by_preflight(evidence) or _by_kernel(evidence, SURE) or _by_text(evidence, reads)
    found = found or _by_kernel(evidence, None) or _by_signal(evidence)
    if found:
        return found
    if evidence.gone:
        hosts = ", ".join(evidence.gone)
        verb = "answers" if len(evidence.gone) == 1 else "answer"
        return Failure(
            "host", f"host: {hosts} no longer {verb}", True, evidence.gone[0], None, _last_step(evidence), evidence.gone
        )
    return _by_silence(evidence) or _by_link(evidence) or _by_echo(evidence)


def _by_preflight(evidence: Evidence) -> Failure | None:
    """Failure that trainer/preflight.py found.

    All ranks print the same lines, which name a host by its node's number.
    """
    found = {}
    for rank in evidence.ranks:
        found |= {line: match for line in rank.lines if (match := PREFLIGHT.search(line))}
    if not found:
        return None
    nodes = sorted({int(match["node"]) for match in found.values() if match["out"]})
    hosts = [*dict.fromkeys(rank.host for rank in sorted(evidence.ranks, key=lambda rank: rank.rank))]
    blamed = tuple(hosts[node] for node in nodes if node < len(hosts))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    line = f"host: {_shortened(next(iter(found)))}{more}"
    return Failure("host", line, bool(blamed), blamed[0] if blamed else "", blamed=blamed)


def _by_kernel(evidence: Evidence, kinds: tuple[Kind, ...] | None) -> Failure | None:
    """Failure that a host's kernel reports.

    A broken GPU explains whatever its rank says; a kernel that went wrong, or some disk, does not.
    """
    for host, lines in evidence.kernel.items():
        cause = read(line for line in lines if (found := read([line])) and (kinds is None or found.kind in kinds))
        if cause and cause.strength == OWN:
            return _of_host(cause, host, evidence)
    for host, count in evidence.oom_kills.items():
        if count:
            says = f"{count} process{'es' * (count > 1)} killed, says memory.events of its cgroup"
            cause = Cause("memory", says, "the host's memory is full", retry=False)
            return _of_host(cause, host, evidence)
    return None


def _of_host(cause: Cause, host: str, evidence: Evidence) -> Failure:
    where = f"{host}: " if host else ""
    blamed = (host,) if host and cause.blames and _own_fault(cause, host, evidence) else ()
    line = f"{cause.kind}: {where}{cause.means}{_quoted(cause.says, cause.means)}"
    return Failure(cause.kind, line, cause.retry, host, None, _last_step(evidence), blamed)


def _by_text(evidence: Evidence, reads: Reads | None) -> Failure | None:
    for rank in sorted(evidence.ranks, key=lambda rank: rank.order):
        cause = _own_cause(rank)
        if cause:
            return _of_rank(cause, rank, evidence, reads)
    return None


def _own_cause(rank: Rank) -> Cause | None:
    cause = read(rank.lines)
    if cause and cause.strength == OWN:
        return cause
    if rank.code == 2 and (faults := [line for line in rank.lines if line.startswith("error: ")]):
        return Cause("user", faults[0], "", retry=False)  # the trainer's own words for it
    errors = [(line, read([line])) for line in rank.lines if ERROR.match(line)]
    own = [line for line, known in errors if known is None]
    if not own or errors[0][1] or not rank.code or rank.code < 0:
        return None  # what follows an echo is its consequence
    return Cause("unknown", own[-1], "")


def _of_rank(cause: Cause, rank: Rank, evidence: Evidence, reads: Reads | None) -> Failure:
    what = cause.means + _quoted(cause.says, cause.means)
    if cause.kind == "data" and reads and rank.step:
        what += f"; step {rank.step + 1} reads {reads.behind(rank.step)}"
    blamed = (rank.host,) if cause.blames and _own_fault(cause, rank.host, evidence) else ()
    line = f"{cause.kind}: {_place(rank)}: {what}"
    return Failure(cause.kind, line, cause.retry, rank.host, rank.rank, rank.step, blamed)


def _own_fault(cause: Cause, host: str, evidence: Evidence) -> bool:
    """Whether the host itself is at fault. A disk that is full on all hosts is the shared one, and no host's fault."""
    if cause.kind != "storage":
        return True
    others = [free for other, free in evidence.free.items() if other != host]
    return bool(others) and min(others) >= FULL


def _by_signal(evidence: Evidence) -> Failure | None:
    """Failure of the first rank that a signal killed, unless that came from stopping the gang.

    A gang is stopped by SIGTERM, and later by SIGKILL.
    """
    killed = (rank for rank in evidence.ranks if rank.code is not None and rank.code < 0)
    for rank in sorted(killed, key=lambda rank: rank.order):
        cause = read(rank.lines)
        aborted_after_echo = rank.code == -signal.SIGABRT and cause is not None
        if rank.code in TERMINATED or aborted_after_echo:
            continue
        name = signal.Signals(-rank.code).name if rank.code else ""
        kind: Kind = "host" if rank.code == -signal.SIGKILL else "unknown"
        by_whom = ", by none of its gang" if rank.code == -signal.SIGKILL else ""
        return Failure(
            kind, f"{kind}: {_place(rank)}: killed by {name}{by_whom}", True, rank.host, rank.rank, rank.step
        )
    return None


def _by_silence(evidence: Evidence) -> Failure | None:
    silent = [rank for rank in evidence.ranks if rank.silent]
    words = {"T": "stopped (SIGSTOP or a debugger)", "t": "stopped by a debugger", "D": "waits for a disk or a driver"}
    for rank in sorted(silent, key=lambda rank: rank.order):
        says = words.get(rank.state, "says nothing, though its process is there")
        more = f" (and {len(silent) - 1} more ranks)" if len(silent) > 1 else ""
        return Failure("hang", f"hang: {_place(rank)}: {says}{more}", True, rank.host, rank.rank, rank.step)
    if not evidence.stalled:
        return None
    steps = {rank.step for rank in evidence.ranks}
    behind = [rank for rank in evidence.ranks if rank.step == min(steps)]
    if len(steps) > 1 and len(behind) < len(evidence.ranks) / 2:
        rank = behind[0]
        others = f", the others at {max(steps)}"
        return Failure("hang", f"hang: {_place(rank)}: makes no step{others}", True, rank.host, rank.rank, rank.step)
    return Failure(
        "hang", f"hang: no rank makes a step after {max(steps, default=0)}", True, step=max(steps, default=0)
    )


def _by_link(evidence: Evidence) -> Failure | None:
    for rank in sorted(evidence.ranks, key=lambda rank: rank.order):
        cause = read(rank.lines)
        if cause and cause.strength == LINK:
            other = f", to {cause.peer}" if cause.peer else ""
            line = f"network: {_place(rank)}: {cause.means}{other}{_quoted(cause.says, cause.means)}"
            return Failure("network", line, True, rank.host, rank.rank, rank.step)
    return None


def _by_echo(evidence: Evidence) -> Failure:
    """Failure where no rank has a cause. The others waited for the rank that says least and never waited itself."""
    step = _last_step(evidence)
    echoes = {rank: cause for rank in evidence.ranks if (cause := read(rank.lines)) and cause.strength == ECHO}
    waiting = {rank: _sequence(rank) for rank, cause in echoes.items() if cause.kind == "hang"}
    if waiting:
        missing = [rank for rank in evidence.ranks if rank not in waiting]
        what = next((f"{operation} number {number}" for number, operation in filter(None, waiting.values())), "others")
        late = missing[0] if len(missing) == 1 else None
        who = f"{_place(late)} did not come" if late else f"{_ranks(missing) or 'none'} did not report"
        line = f"hang: {_ranks(waiting)} waited for {what}; {who}"
        return Failure("hang", line, True, late.host if late else "", late.rank if late else None, step)
    lost = sorted((rank for rank in echoes), key=lambda rank: rank.order)
    if lost:
        says = _shortened(echoes[lost[0]].says)
        line = f"network: {_place(lost[0])} lost another rank, and none says why: {says}"
        return Failure("network", line, True, lost[0].host, lost[0].rank, step)
    ended = [rank for rank in evidence.ranks if rank.code]
    if ended and all(rank.code in TERMINATED for rank in ended):
        return Failure("preempted", "preempted: all ranks were told to end (SIGTERM)", True, step=step)
    if ended:
        rank = min(ended, key=lambda rank: rank.order)
        line = f"unknown: {_place(rank)}: ended with code {rank.code} and said nothing"
        return Failure("unknown", line, True, rank.host, rank.rank, rank.step)
    return Failure("unknown", "unknown: the gang ended, and no rank says why", True, step=step)


def _sequence(rank: Rank) -> tuple[str, str] | None:
    found = next(filter(None, map(SEQUENCE.search, rank.lines)), None)
    return (found[1], found[2]) if found else None


def _named(evidence: Evidence, line: str) -> str:
    hosts = {rank.host for rank in evidence.ranks} | {*evidence.gone, *evidence.free}
    return next((host for host in sorted(hosts, key=len, reverse=True) if host and host in line), "")


def _last_step(evidence: Evidence) -> int:
    return max((rank.step for rank in evidence.ranks), default=0)


def _place(rank: Rank) -> str:
    return f"rank {rank.rank} on {rank.host}" + (f" after step {rank.step}" if rank.step else "")


def _ranks(ranks: Iterable[Rank]) -> str:
    numbers = sorted(rank.rank for rank in ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}" if numbers else ""


def _quoted(says: str, means: str) -> str:
    short = _shortened(says)
    return f" ({short})" if means else short


def _shortened(line: str) -> str:
    line = re.sub(r"^((\[rank\d+\]: ?)+|error: )", "", line)  # torch's and the trainer's marks
    return line if len(line) <= LONGEST else line[:LONGEST] + "..."
