"""Trains one run on several hosts, attempt after attempt, until it is done or no attempt can help.

    train(run, folder, store, gang, say, stop, tick, teller)

An attempt takes all the hosts it needs or none; its members are told to go at once, and to stop at once when one of
them fails. What they died of is one line (tasks/gang/failures.py), what follows is a rule (tasks/gang/restart.py), and
the next attempt goes on from the newest complete checkpoint. No attempt begins before every member of the last one is
known to be over, or must have ended itself: a member that nobody hears from stops after STALE seconds.

Where gang.min_nodes allows fewer hosts, the next attempt takes as many as there are, and those after it all again once
there are enough. The folder lies on storage that all hosts share. Not covered: a gang that has begun does not grow
before its next attempt; hosts that Slurm or Kubernetes has lost by itself are waited for.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.load import as_yaml
from conf.schema import Run
from tasks import lease
from tasks.faults import Fault, Stopped
from tasks.gang import restart
from tasks.gang.aside import aside
from tasks.gang.board import STALE, Board, newest_attempt
from tasks.gang.engines import Engine, Handle, engine_of
from tasks.gang.evidence import host_names, of_attempt, preempted, was_told
from tasks.gang.failures import Failure
from tasks.gang.fence import ENDED_BY_ITSELF, wait_for_the_last
from tasks.gang.history import History, Teller
from tasks.gang.lookout import Lookout
from tasks.gang.restart import Attempt
from tasks.launch import Broken
from tasks.store import Store, open_store

TICK = 0.5
SETTLE = 2.5  # seconds between the first report of a failure and the verdict: others may know better
ASKED = 3.0  # seconds between questions about capacity
LEAVE_WITHIN = 20.0
# Whom a run over several hosts may leave a half-written checkpoint of is settled by marks: trainer/checkpoints.py.


@dataclass(frozen=True)
class Gang:
    """What stays the same over all attempts."""

    name: str
    folder: Path
    store: Store
    engine: Engine
    say: Callable[[str], None]
    stop: Callable[[], bool]
    tick: Callable[[], None]
    teller: Teller


@dataclass(frozen=True)
class Outcome:
    hosts: tuple[str, ...]
    failure: Failure | None  # None = done


def train(
    run: Run,
    folder: Path,
    store: Store,
    name: str,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    tick: Callable[[], None] = lambda: None,
    teller: Teller | None = None,
) -> None:
    """Raises Fault, Broken or Stopped. say and tick are called by another thread, and not waited for."""
    teller = teller or Teller(History(name, run.name, ""), folder / "files/metrics.jsonl")
    hasty = open_store(store.uri, hasty=True)
    with aside(say, tick) as (say_later, tick_later):
        _train(run, Gang(name, folder, hasty, engine_of(run), say_later, stop, tick_later, teller))


def _train(run: Run, gang: Gang) -> None:
    wait_for_the_last(gang.store, gang.name, gang.say, lambda: _pause(gang, 1.0))
    attempts: list[Attempt] = []
    without: tuple[str, ...] = ()
    wanted = run
    while True:
        outcome = _attempt(gang, run, without)
        if outcome.failure is None:
            return
        attempts.append(Attempt(outcome.failure, outcome.hosts, _newest(run)))
        available = _available(gang, wanted, restart.left_out(attempts))
        facts, gpu = restart.limits(wanted)
        next_ = restart.decide(attempts, wanted, run.gang.retries, run.gang.min_nodes, available, facts, gpu)
        gang.teller.follows(next_.line)
        if next_.action == "stop":
            _give_up(run, outcome.failure, next_.line)
        gang.say(f"{outcome.failure.line}; {next_.line}")
        without = next_.without
        if available is not None:
            run = restart.shrunk(wanted, next_.nodes) or wanted
        _pause(gang, next_.wait)


def _attempt(gang: Gang, run: Run, without: tuple[str, ...]) -> Outcome:
    with _turn(gang, run, without):
        board, lookout = _announce(gang, run)
        gang.teller.begins(board.attempt)
        handle = None
        try:
            handle = gang.engine.start(run, board, run.layout.nodes, without)
            if failure := _gather(gang, run, lookout, handle):
                return failure
            _go(lookout, run)
        except BaseException as error:
            _end(gang, run, lookout, handle, str(error) or type(error).__name__, save=False)
            raise
        finally:
            (gang.folder / "probe").unlink(missing_ok=True)
    try:
        hosts = host_names(lookout)
        gang.teller.trains(hosts, lookout.nodes, run.layout.gpus_per_node, _newest(run))
        gang.say(f"attempt {board.attempt}: {', '.join(hosts.values())} train; logs in {gang.store.link(board.place)}")
        failure = _watch(gang, run, lookout, handle, hosts)
    except Stopped:
        _end(gang, run, lookout, handle, "cancelled", save=True)
        raise
    except BaseException as error:
        _end(gang, run, lookout, handle, f"{type(error).__name__}: {error}", save=False)
        raise
    saves = failure is not None and failure.kind == "preempted"
    _end(gang, run, lookout, handle, failure.line if failure else "done", save=saves)
    return Outcome(tuple(hosts.values()), failure)


@contextlib.contextmanager
def _turn(gang: Gang, run: Run, without: tuple[str, ...]) -> Iterator[None]:
    """Enough hosts are free, and no other gang reaches for them until this one has them or has given them back.

    Nobody waits for hosts while it holds the turn: a gang that needs many does not keep one that needs few.
    """
    told, key = "", gang.engine.turn(run)
    while True:
        why = gang.engine.capacity(run, without)
        if why is None:
            break
        if why != told:
            gang.say(f"waits for hosts: {why}")
            told = why
        _pause(gang, ASKED)
    if key is None:
        yield
        return
    with lease.hold(gang.store, f"gangs/turns/{key}.json", gang.say, gang.name, gang.stop):
        if why := gang.engine.capacity(run, without):
            again = True
        else:
            again = False
            yield
    if again:
        with _turn(gang, run, without):
            yield


def _available(gang: Gang, wanted: Run, without: tuple[str, ...]) -> int | None:
    """Hosts, those that are left out counted in. None where nobody wants to know, or the engine does not."""
    found = gang.engine.available(wanted, without) if wanted.gang.min_nodes else None
    return None if found is None else found + len(without)


def _announce(gang: Gang, run: Run) -> tuple[Board, Lookout]:
    """The next attempt, on the board."""
    token = secrets.token_hex(8)
    (gang.folder / "probe").write_text(token)
    number = newest_attempt(gang.store, gang.name)
    while True:
        number += 1
        board = Board(gang.store, gang.name, number)
        board.write("resolved.yaml", as_yaml(run).encode())
        lookout = Lookout(board, str(gang.folder / "probe"))
        if lookout.begin():
            return board, lookout


def _gather(gang: Gang, run: Run, lookout: Lookout, handle: Handle) -> Outcome | None:
    """Until all are there. The outcome where they do not come in time, or one ends first."""
    token, until, told = (gang.folder / "probe").read_text(), time.monotonic() + run.gang.start_within, -1
    queued = None
    while True:
        _pause(gang, TICK)
        if why := handle.waits():
            until = time.monotonic() + run.gang.start_within
            if why != queued:
                queued = why
                gang.say(f"waits for hosts: {why}")
        nodes, n = dict(lookout.nodes), run.layout.nodes
        for node in nodes.values():
            if node["probe"] != token:
                raise Fault(
                    f"FINETUNE_RUNS: {gang.folder} is not the same storage on {node['host']} ({node['address']}); "
                    "name a folder of a file system that all hosts share"
                )
        waiting = [k for k, node in nodes.items() if node["state"] == "waiting" and lookout.silence(k) < STALE]
        if len(waiting) == n:
            return None
        if len(waiting) != told:
            told = len(waiting)
            gang.say(f"attempt {lookout.board.attempt}: {told} of {n} hosts are there")
        over = [k for k, alive in handle.alive().items() if alive is False]
        over += [k for k, node in nodes.items() if k not in waiting]
        if over:
            line = f"host: member {over[0]} ended before the gang was complete; its log says why"
        elif time.monotonic() > until:
            line = f"host: {len(waiting)} of {n} hosts came within {run.gang.start_within:.0f} s"
        else:
            continue
        line = "; ".join((line, *handle.words()[-1:]))
        failure = Failure("host", line, True)
        _end(gang, run, lookout, handle, line, save=False)
        return Outcome(tuple(host_names(lookout).values()), failure)


def _go(lookout: Lookout, run: Run) -> None:
    nodes = dict(sorted(lookout.nodes.items()))
    order = list(nodes)
    first = nodes[order[0]]
    peers = {str(k): [node["address"], node["port"]] for k, node in nodes.items()}
    lookout.say(state="go", order=order, master=[first["address"], first["master_port"]], peers=peers)


def _watch(gang: Gang, run: Run, lookout: Lookout, handle: Handle, hosts: dict[int, str]) -> Failure | None:
    """Until all are done, or one has failed."""
    first: float | None = None
    gone: set[int] = set()
    while True:
        _pause(gang, TICK)
        _pass_on(gang, lookout)
        gang.tick()
        if lookout.lost:
            raise Broken(f"{lookout.board.place}: another controller has taken it over")
        nodes = dict(lookout.nodes)
        states = {k: nodes[k]["state"] for k in hosts}
        if all(state == "done" for state in states.values()):
            return None if _newest(run) >= _last_step(run) else preempted(nodes)
        ended = {k for k, alive in handle.alive().items() if alive is False}
        over = {k for k, state in states.items() if state in ("done", "failed", "preempted", "stopped", "stopping")}
        gone = {k for k in hosts if k not in over and (k in ended or lookout.silence(k) > run.gang.silent_after)}
        if any(was_told(node) for node in nodes.values()) and lookout.word["state"] == "go":
            lookout.say(state="stop", reason="a host was told to end", save=True)  # all save, or none has a checkpoint
        wrong = gone or any(state not in ("running", "waiting", "done") for state in states.values())
        if wrong and first is None:
            first = time.monotonic()
        if first is not None and time.monotonic() - first > SETTLE:
            if not wrong:  # whoever was silent is back
                first = None
                continue
            return of_attempt(run, lookout, nodes, hosts, gone, handle.words())


def _end(gang: Gang, run: Run, lookout: Lookout, handle: Handle | None, reason: str, save: bool) -> None:
    """Returns once no member can be alive."""
    lookout.say(state="stop", reason=reason, save=save)
    gang.teller.ends(reason)
    since = time.monotonic()
    while handle is not None:
        _pass_on(gang, lookout)
        engine, nodes = handle.alive(), dict(lookout.nodes)
        left = [k for k in range(run.layout.nodes) if not nodes.get(k, {}).get("over") and engine.get(k) is not False]
        joined = [k for k in left if k in nodes]
        quiet = all(lookout.silence(k) > ENDED_BY_ITSELF for k in joined)
        if not joined or quiet or time.monotonic() - since > 2 * ENDED_BY_ITSELF:
            break
        time.sleep(TICK)
    if handle is not None:
        handle.cancel()
    _pass_on(gang, lookout)
    lookout.end(LEAVE_WITHIN)


def _give_up(run: Run, failure: Failure, line: str) -> None:
    if failure.kind == "memory":
        line += f"; {restart.advice(run)}"
    raise Fault(line) if failure.kind in ("user", "data", "memory") else Broken(line)


def _pass_on(gang: Gang, lookout: Lookout) -> None:
    while lookout.lines:
        gang.say(lookout.lines.popleft())


def _pause(gang: Gang, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        if gang.stop():
            raise Stopped(f"{gang.name}: stopped")
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, TICK))


def _last_step(run: Run) -> int:
    return min(run.train.steps, run.train.stop_after or run.train.steps)


def _newest(run: Run) -> int:
    """Step of the newest checkpoint that is marked complete (trainer/checkpoints.py); 0 where there is none."""
    steps = [0]
    for mark in Path(run.paths.output).glob("checkpoints/iter_*/complete.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            files = json.loads(mark.read_text())["files"]
            if all((mark.parent / name).stat().st_size == size for name, size in files.items()):
                steps.append(int(mark.parent.name.removeprefix("iter_")))
    return max(steps)
