"""Next step after a failed attempt: again, without a host, on fewer hosts, or the end.

Pure: history in, decision out.

    decide(attempts, run, retries=3, min_nodes=2, available=None) -> Decision
    fewer(run, left, min_nodes, facts, gpu) -> int | None      how many of those that are left to go on with
    limits(run) -> facts, gpu                          what fewer hosts are held against, as far as it is known
    shrunk(run, nodes, facts) -> Run | None            the same run on fewer hosts, if its layout allows
    advice(run) -> str                                 what to change when memory was not enough, from the plan

The rules, each with its reason:

- What would fail again ends the run: a wrong configuration, a row, memory (and advice() says what would fit).
- Retries are counted since the last checkpoint that got further: its tenth broken host does not end a run of a month.
- Preemption is nobody's failure and does not count; without any progress ten times in a row it does.
- The same cause twice at the same step, once on other hosts, is the program's or the data's: no third time.
- A host that is to blame by itself (Xid, ECC, gone) is left out at once; one that was merely first in two attempts is
  left out then.
- With fewer hosts left than the layout wants: fewer nodes if gang.min_nodes allows it and a layout of the same model,
  batch and degrees fits on them (dp shrinks, gradient accumulation grows; the losses stay, README: Layouts). Else the
  gang waits for a host.
- Waits grow from 5 s to 2 minutes where the cause is a service (storage, network): it may be coming back.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from conf.model_facts import ModelFacts
from conf.planner.hardware import GB, Gpu, of
from conf.planner.search import Candidate, search
from conf.planner.verdict import facts_of, plan
from conf.rules.layout import problems
from conf.schema.run import Run
from contract.faults import ConfigError
from tasks.gang.diagnosis.classify import Failure

Action = Literal["retry", "retry without", "fewer", "stop"]

FRUITLESS = 10  # preemptions without a checkpoint between them
SUSPECT = 2  # attempts in which a host was the first to fail
WAIT, LONGEST_WAIT = 5.0, 120.0  # seconds
RETRY_AT_ONCE = ("host", "hang", "preempted", "unknown")
SLOWER = 1.25  # than the fastest is worth it for fewer changes
ROOM = 0.9  # of the memory that was not enough, by the plan; what plans and measured runs have differed by


def on_all(run: Run) -> Run:
    """The training of a job that trains on all its hosts."""
    return run


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended, as the controller saw it."""

    failure: Failure
    hosts: tuple[str, ...]
    checkpoint: int = 0  # newest complete step when it ended


@dataclass(frozen=True)
class Decision:
    action: Action
    line: str
    without: tuple[str, ...] = ()  # hosts that take no part from now on
    nodes: int = 0  # of the next attempt
    wait: float = 0.0  # seconds before it


def decide(
    attempts: Sequence[Attempt],
    run: Run,
    retries: int,
    min_nodes: int | None = None,
    available: int | None = None,
    facts: ModelFacts | None = None,
    gpu: Gpu | None = None,
    trains: Callable[[Run], Run] = on_all,
) -> Decision:
    """Decide what follows the last attempt.

    `run` has all the hosts that it wants, also where the last attempt had fewer. `available` is the number of hosts
    that the engine could give, with broken ones; None means that it is unknown, and that starting will tell.

    With `facts` of the model a smaller layout is checked against them, and with `gpu` also the memory that it takes.
    `trains` is the training on the hosts of a run, where others of them do something else.
    """
    last, failure = attempts[-1], attempts[-1].failure
    if not failure.retry:
        return Decision("stop", failure.line)
    since = _since_progress(attempts)
    counted = [attempt for attempt in since if attempt.failure.kind != "preempted"]
    if len(counted) > retries:
        return Decision("stop", f"{failure.line}; {len(counted)} failures since step {last.checkpoint}, of {retries}")
    if len(since) - len(counted) >= FRUITLESS:
        return Decision("stop", f"{failure.line}; taken back {FRUITLESS} times since step {last.checkpoint}")
    if _repeats(counted):
        again = f"twice at step {failure.step}, on other hosts: not a host's fault"
        return Decision("stop", f"{failure.line}; {again}")
    out = left_out(attempts)
    wait = 0.0
    if failure.kind not in RETRY_AT_ONCE:
        wait = min(LONGEST_WAIT, WAIT * 2 ** (len(counted) - 1))
    nodes = run.layout.nodes
    if available is not None and available - len(out) < nodes:
        left = fewer(run, available - len(out), min_nodes, facts, gpu, trains)
        if left:
            line = f"goes on with {left} of {run.layout.nodes} hosts, without {', '.join(out) or 'those that are gone'}"
            return Decision("fewer", line, out, left, wait)
    if out:
        return Decision("retry without", f"goes on without {', '.join(out)}", out, nodes, wait)
    line = f"goes on from step {last.checkpoint}" if last.checkpoint else "begins again"
    return Decision("retry", line, (), nodes, wait)


def left_out(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Hosts to be left out. The last to fail comes first."""
    out: Counter[str] = Counter()
    last: dict[str, int] = {}
    for number, attempt in enumerate(attempts):
        suspects = {attempt.failure.host} if attempt.failure.kind in ("host", "hang", "network", "storage") else set()
        for host in suspects.union(attempt.failure.blamed) - {""}:
            out[host] += SUSPECT if host in attempt.failure.blamed else 1
            last[host] = number
    hosts = (host for host, count in out.items() if count >= SUSPECT)
    return tuple(sorted(hosts, key=lambda host: (-last[host], host)))


def _since_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Attempts at the end of the history that ended with the newest checkpoint, in order."""
    newest = attempts[-1].checkpoint
    since: list[Attempt] = []
    for attempt in reversed(attempts):
        since.insert(0, attempt)
        earlier = attempts[: len(attempts) - len(since)]
        if not earlier or earlier[-1].checkpoint < newest:
            break
    return since


def _repeats(counted: Sequence[Attempt]) -> bool:
    if len(counted) < 2:
        return False
    last, before = counted[-1], counted[-2]
    same = last.failure.kind == before.failure.kind == "unknown" and last.failure.step == before.failure.step
    return same and last.failure.host != before.failure.host


def fewer(
    run: Run,
    left: int,
    min_nodes: int | None,
    facts: ModelFacts | None,
    gpu: Gpu | None,
    trains: Callable[[Run], Run] = on_all,
) -> int | None:
    """Number of hosts to go on with, of those that are left; `min_nodes` is the fewest of those that train."""
    if min_nodes is None:
        return None
    for nodes in range(min(left, run.layout.nodes - 1), min_nodes - 1, -1):
        smaller = shrunk(run, nodes, facts, gpu, trains)
        if smaller and trains(smaller).layout.nodes >= min_nodes:
            return nodes
    return None


def shrunk(
    run: Run,
    nodes: int,
    facts: ModelFacts | None = None,
    gpu: Gpu | None = None,
    trains: Callable[[Run], Run] = on_all,
) -> Run | None:
    """The run on fewer hosts. All degrees stay, dp and edp shrink.

    The result is None where the training's layout is illegal then, or, with `gpu`, would not fit.
    """
    if nodes < 1:
        return None
    smaller = run.model_copy(update={"layout": run.layout.model_copy(update={"nodes": nodes})})
    training = trains(smaller)
    if training.layout.nodes < 1 or problems(training, facts):
        return None
    if gpu and facts and not plan(training, facts, gpu).fits:
        return None
    return smaller


def limits(run: Run) -> tuple[ModelFacts | None, Gpu | None]:
    try:
        return facts_of(run), of(run) if run.hardware.gate == "stop" else None
    except ConfigError:
        return None, None


def advice(run: Run) -> str:
    """Overrides that need a tenth less memory than was missing before: few of them, and about as fast as any."""
    try:
        facts, kind = facts_of(run), of(run)
        now = plan(run, facts, kind)
        enough = ROOM * min(now.fullest.total if now.stages else kind.memory, kind.memory)
        found = [one for one in search(run, facts, kind, run.layout.world).fitting if one.memory <= enough]
    except ConfigError as error:
        return f"no advice: {error.args[0]}"
    if not found:
        return f"no layout of {run.layout.world} {kind.name} takes less by the plan: take more GPUs, or train less"
    fast = [one for one in found if one.seconds <= SLOWER * found[0].seconds]
    best = min(fast, key=lambda one: len(_changes(run, one)))
    changes = _changes(run, best)
    return f"try {' '.join(changes)}: {best.memory / GB:.0f} GB instead of {enough / ROOM / GB:.0f} by the plan"


def _changes(run: Run, one: Candidate) -> list[str]:
    pairs = (
        ("layout", run.layout, one.layout),
        ("train", run.train, one.train),
        ("optimizer", run.optimizer, one.optimizer),
    )
    return [
        f"{section}.{key}={_shown(getattr(new, key))}"
        for section, old, new in pairs
        for key in type(new).model_fields
        if getattr(new, key) != getattr(old, key)
    ]


def _shown(value) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
