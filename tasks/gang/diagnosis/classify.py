"""Diagnosis of a failed attempt: the most probable cause in the evidence of ranks and hosts, and whether to retry.

    classify(Evidence(ranks=(Rank(0, "a", code=1, lines=("...",), order=7), ...), gone=("b",))) -> Failure

One of N ranks has a cause, and the others report that they lost it. The order of causes is therefore: an error text,
death by a signal, a lost host, ranks that hang, failed connections. The order in which ranks died decides only between
equal causes. The texts are in tasks/gang/diagnosis/causes.yaml, the next action in tasks/gang/diagnosis/next_step.py.

    kind        for example                               retry
    user        configuration, environment, checkpoint    no: it would fail again
    memory      out of memory: GPU, host, /dev/shm        no: the plan says what to change
    data        a row that cannot be trained on           no: the line names the row
    host        Xid, ECC, SIGKILL from outside, gone      yes, without the host if it is the cause
    network     RDMA errors, hosts without a connection   yes
    storage     disk full, file system gone               yes, without a host whose local disk is full
    preempted   the scheduler took a host                 yes
    hang        SIGSTOP, a missing rank                   yes
    unknown     any other, with the line of the error     yes, but not twice at the same step
"""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from conf.schema.run import Run
from tasks.gang.diagnosis.causes import ECHO, LINK, OWN, Cause, Kind, read

SURE: tuple[Kind, ...] = ("host", "memory")  # kinds on which the kernel's log is more reliable than any process's
FULL = 10**9  # bytes free under which a disk counts as full; a checkpoint's smallest file is more
LONGEST = 200  # characters of an error's line
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # after a failure torchrun ends the other ranks with SIGTERM
# Last line of a Python traceback, such as "RuntimeError: ..."; torch puts [rank1]: in front, on a GPU twice.
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)*(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b.*")
MISFIT = re.compile(r"(?P<check>preflight|corruption): node (?P<node>\d+), host .*?(?P<out>; to be left out)?$")
SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")


@dataclass(frozen=True)
class Rank:
    """Traces of one rank from before the gang was stopped."""

    rank: int
    host: str
    code: int | None = None  # exit code, negative = signal; None = alive
    step: int = 0
    lines: tuple[str, ...] = ()  # its error and the end of its log
    order: float = 0.0  # position among the reports on the board; clocks of hosts are never compared
    silent: bool = False  # its signs of life have stopped
    state: str = ""  # of the process in /proc, such as T or D


@dataclass(frozen=True)
class Evidence:
    ranks: tuple[Rank, ...] = ()
    gone: tuple[str, ...] = ()  # hosts whose heartbeat has stopped
    kernel: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by host: lines of its kernel's log since go
    oom_kills: dict[str, int] = field(default_factory=dict)  # by host: of its cgroup's memory.events, since go
    free: dict[str, int] = field(default_factory=dict)  # by host: bytes of disk
    engine: tuple[str, ...] = ()  # the engine's lines: reasons of pods, Slurm's messages
    stalled: bool = False  # all ranks are alive and no step completes


@dataclass(frozen=True)
class Failure:
    kind: Kind
    line: str  # for the user
    retry: bool
    host: str = ""
    rank: int | None = None
    step: int = 0
    blamed: tuple[str, ...] = ()  # hosts that later attempts exclude


def classify(evidence: Evidence, run: Run | None = None) -> Failure:
    """Find the cause of a failed attempt. With the run, the line of a data error names the samples of its step."""
    reported = read(evidence.engine)
    if reported and reported.strength == OWN:
        return _of_host(reported, _named(evidence, reported.says), evidence)
    failure = _by_checks(evidence) or _by_kernel(evidence, SURE) or _by_text(evidence, run)
    failure = failure or _by_kernel(evidence, None) or _by_signal(evidence)
    if failure:
        return failure
    if evidence.gone:
        hosts = ", ".join(evidence.gone)
        verb = "answers" if len(evidence.gone) == 1 else "answer"
        return Failure(
            "host", f"host: {hosts} no longer {verb}", True, evidence.gone[0], None, _last_step(evidence), evidence.gone
        )
    return _by_silence(evidence) or _by_link(evidence) or _by_echo(evidence)


def _by_checks(evidence: Evidence) -> Failure | None:
    """Hosts that trainer/preflight.py or trainer/training/replicas.py names. All ranks print the same lines."""
    matches = {}
    for rank in evidence.ranks:
        matches |= {line: match for line in rank.lines if (match := MISFIT.search(line))}
    if not matches:
        return None
    nodes = sorted({int(match["node"]) for match in matches.values() if match["out"]})
    hosts = [*dict.fromkeys(rank.host for rank in sorted(evidence.ranks, key=lambda rank: rank.rank))]
    blamed = tuple(hosts[node] for node in nodes if node < len(hosts))
    more = f" (and {len(matches) - 1} more)" if len(matches) > 1 else ""
    line = f"host: {_shortened(next(iter(matches)))}{more}"
    retry = bool(blamed) or any(match["check"] == "corruption" for match in matches.values())
    return Failure("host", line, retry, blamed[0] if blamed else "", blamed=blamed)


def _by_kernel(evidence: Evidence, kinds: tuple[Kind, ...] | None) -> Failure | None:
    """Failure that a host's kernel reports.

    A broken GPU explains every error of its rank; a failed GPU kernel or disk does not.
    """
    for host, lines in evidence.kernel.items():
        cause = read(line for line in lines if (known := read([line])) and (kinds is None or known.kind in kinds))
        if cause and cause.strength == OWN:
            return _of_host(cause, host, evidence)
    for host, count in evidence.oom_kills.items():
        if count:
            says = f"{count} process{'es' * (count > 1)} killed, by memory.events of its cgroup"
            cause = Cause("memory", says, "the host's memory is full", retry=False)
            return _of_host(cause, host, evidence)
    return None


def _of_host(cause: Cause, host: str, evidence: Evidence) -> Failure:
    where = f"{host}: " if host else ""
    line = f"{cause.kind}: {where}{_meaning(cause)}"
    return Failure(cause.kind, line, cause.retry, host, None, _last_step(evidence), _blamed(cause, host, evidence))


def _by_text(evidence: Evidence, run: Run | None) -> Failure | None:
    for rank in sorted(evidence.ranks, key=lambda rank: rank.order):
        cause = _own_cause(rank)
        if cause:
            return _of_rank(cause, rank, evidence, run)
    return None


def _own_cause(rank: Rank) -> Cause | None:
    cause = read(rank.lines)
    if cause and cause.strength == OWN:
        return cause
    if rank.code == 2 and (faults := [line for line in rank.lines if line.startswith("error: ")]):
        return Cause("user", faults[0], "", retry=False)  # the trainer's message is clear
    errors = [(line, read([line])) for line in rank.lines if ERROR.match(line)]
    own = [line for line, known in errors if known is None]
    if not own or errors[0][1] or not rank.code or rank.code < 0:
        return None  # errors after an echo are its consequences
    return Cause("unknown", own[-1], "")


def _of_rank(cause: Cause, rank: Rank, evidence: Evidence, run: Run | None) -> Failure:
    what = f": {_meaning(cause)}"
    if cause.kind == "data" and run and rank.step:
        first = rank.step * run.train.global_batch
        samples = f"samples {first} to {first + run.train.global_batch - 1} of {run.paths.data}"
        what += f"; step {rank.step + 1} reads {samples}, in training's order"
    return _at(rank, cause.kind, what, cause.retry, _blamed(cause, rank.host, evidence))


def _at(rank: Rank, kind: Kind, what: str, retry: bool = True, blamed: tuple[str, ...] = ()) -> Failure:
    return Failure(kind, f"{kind}: {_place(rank)}{what}", retry, rank.host, rank.rank, rank.step, blamed)


def _blamed(cause: Cause, host: str, evidence: Evidence) -> tuple[str, ...]:
    """Return the host, if it is known and the cause. A disk that is full on all hosts is shared storage."""
    others = [free for other, free in evidence.free.items() if other != host]
    is_shared = cause.kind == "storage" and min(others, default=0) < FULL
    return (host,) if host and cause.blames and not is_shared else ()


def _by_signal(evidence: Evidence) -> Failure | None:
    """Failure of the first rank that a signal killed, except the signals with which a gang is stopped.

    A gang is stopped with SIGTERM, and later with SIGKILL.
    """
    killed = (rank for rank in evidence.ranks if rank.code is not None and rank.code < 0)
    for rank in sorted(killed, key=lambda rank: rank.order):
        cause = read(rank.lines)
        aborted_after_echo = rank.code == -signal.SIGABRT and cause is not None
        if rank.code in TERMINATED or aborted_after_echo:
            continue
        name = signal.Signals(-rank.code).name if rank.code else ""
        kind: Kind = "host" if rank.code == -signal.SIGKILL else "unknown"
        origin = " from outside the gang" if rank.code == -signal.SIGKILL else ""
        return _at(rank, kind, f": killed by {name}{origin}")
    return None


def _by_silence(evidence: Evidence) -> Failure | None:
    silent = [rank for rank in evidence.ranks if rank.silent]
    words = {"T": "stopped (SIGSTOP or a debugger)", "t": "stopped by a debugger", "D": "waits for a disk or a driver"}
    for rank in sorted(silent, key=lambda rank: rank.order):
        says = words.get(rank.state, "gives no sign of life, though its process exists")
        more = f" (and {len(silent) - 1} more ranks)" if len(silent) > 1 else ""
        return _at(rank, "hang", f": {says}{more}")
    if not evidence.stalled:
        return None
    steps = {rank.step for rank in evidence.ranks}
    late = [rank for rank in evidence.ranks if rank.step == min(steps)]
    if len(steps) > 1 and len(late) < len(evidence.ranks) / 2:
        return _at(late[0], "hang", f": completes no step, the others are at {max(steps)}")
    last = max(steps, default=0)
    return Failure("hang", f"hang: no rank completes a step after {last}", True, step=last)


def _by_link(evidence: Evidence) -> Failure | None:
    for rank in sorted(evidence.ranks, key=lambda rank: rank.order):
        cause = read(rank.lines)
        if cause and cause.strength == LINK:
            other = f", to {cause.peer}" if cause.peer else ""
            return _at(rank, "network", f": {cause.means}{other} ({_shortened(cause.says)})")
    return None


def _by_echo(evidence: Evidence) -> Failure:
    """Return the failure if no rank has a cause: the others waited for a rank that did not report that it waits."""
    step = _last_step(evidence)
    echoes = {rank: cause for rank in evidence.ranks if (cause := read(rank.lines)) and cause.strength == ECHO}
    waiting = {rank: _sequence(rank) for rank, cause in echoes.items() if cause.kind == "hang"}
    if waiting:
        missing = [rank for rank in evidence.ranks if rank not in waiting]
        what = next((f"{operation} number {number}" for number, operation in filter(None, waiting.values())), "others")
        late = missing[0] if len(missing) == 1 else None
        who = f"{_place(late)} did not join" if late else f"{_ranks(missing) or 'none'} did not report"
        line = f"hang: {_ranks(waiting)} waited for {what}; {who}"
        return Failure("hang", line, True, late.host if late else "", late.rank if late else None, step)
    if echoes:
        first = min(echoes, key=lambda rank: rank.order)
        says = _shortened(echoes[first].says)
        return replace(_at(first, "network", f" lost another rank, and no rank reports the cause: {says}"), step=step)
    ended = [rank for rank in evidence.ranks if rank.code]
    if ended and all(rank.code in TERMINATED for rank in ended):
        return Failure("preempted", "preempted: all ranks were ended by SIGTERM", True, step=step)
    if ended:
        first = min(ended, key=lambda rank: rank.order)
        return _at(first, "unknown", f": ended with code {first.code} and without a message")
    return Failure("unknown", "unknown: the gang ended, and no rank reports the cause", True, step=step)


def _sequence(rank: Rank) -> tuple[str, str] | None:
    match = next(filter(None, map(SEQUENCE.search, rank.lines)), None)
    return (match[1], match[2]) if match else None


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


def _meaning(cause: Cause) -> str:
    short = _shortened(cause.says)
    return f"{cause.means} ({short})" if cause.means else short


def _shortened(line: str) -> str:
    line = re.sub(r"^((\[rank\d+\]: ?)+|error: )", "", line)  # prefixes of torch and the trainer
    return line if len(line) <= LONGEST else line[:LONGEST] + "..."
