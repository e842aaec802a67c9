"""Controller of a gang: it runs a job on several hosts, attempt after attempt, until it is done or nothing can help.

    carry_out(Gang(name, folder, Training(run), store, engine, teller, say, stop, tick, fits, advice))

An attempt takes all the hosts that it needs, or none. All members start at once, and all stop as soon as one of them
fails. The cause becomes one line (tasks/gang/diagnosis/classify.py), a rule decides the next step
(tasks/gang/diagnosis/next_step.py), and the next attempt resumes from the newest complete checkpoint. No attempt starts
before every member of the last one has certainly ended: a member without contact stops after STALE seconds.

A training or conversion is done when all its members are. An evaluation is done when its first member is: that one has
the answers, the others only compute. A reinforcement learning is done when the first members, which train, are done; it
continues without the members after them, which answer prompts.

If gang.min_nodes allows fewer hosts, the next attempt takes the hosts that are left. Later attempts take all again once
there are enough. If hosts do not share the folder, a training's checkpoints are copied to the store
(tasks/gang/copies.py), and each host fetches missing files. Free hosts join a running attempt as spare hosts
(tasks/gang/spare_hosts.py). Not covered: a running attempt never trains on more hosts.

Reports to other services run in background threads (tasks/run/courier.py): a server that hangs does not block the
controller. All are delivered before the end, unless the receiver needs more than DELIVERY_TIME seconds. Late ticks are
merged into one, and a last tick runs at the end.
"""

import contextlib
import signal
import time
import traceback
from dataclasses import replace

from conf.schema.run import Run
from contract.faults import Fault, Stopped
from tasks.gang import spare_hosts
from tasks.gang.attempt import (
    ENDED_BY_ITSELF,
    LEAVE_WITHIN,
    TICK,
    Gang,
    Kept,
    Outcome,
    announce,
    gather,
    go,
    turn,
    wait_for_the_last,
)
from tasks.gang.controller_link import Lookout
from tasks.gang.diagnosis import next_step
from tasks.gang.diagnosis.classify import Failure
from tasks.gang.diagnosis.evidence import host_names, of_attempt, preempted, was_told
from tasks.gang.diagnosis.next_step import Attempt
from tasks.gang.engines import Demand, Handle, spared
from tasks.run.courier import Courier, closing
from tasks.run.launch import Broken

SETTLE = 2.5  # seconds from the first report of a failure to the verdict: later reports may explain it
DELIVERY_TIME = 3.0  # a cancelled flow run has 30 s, and a checkpoint may take most of them


def carry_out(gang: Gang) -> None:
    """Run the gang's job to its end. Raises Fault, Broken or Stopped.

    Other threads call gang.say and gang.tick, and nothing waits for them.
    """
    lines = Courier(gang.say, "lines")
    ticks: Courier[None] = Courier(lambda _: gang.tick(), "ticks", most=1)
    with closing(DELIVERY_TIME, lines, ticks):
        try:
            _carry_out(replace(gang, say=lines.take, tick=lambda: ticks.take(None)))
        finally:
            ticks.take(None)


def _carry_out(gang: Gang) -> None:
    run = wanted = gang.run
    wait_for_the_last(gang)
    attempts: list[Attempt] = []
    without: tuple[str, ...] = ()
    kept: Kept | None = None
    while True:
        outcome = _survived(gang, run, without, kept)
        if outcome.failure is None:
            gang.deliver()
            return
        with contextlib.ExitStack() as members:
            if outcome.kept:
                members.callback(outcome.kept.release)
            attempts.append(Attempt(outcome.failure, gang.newest()))
            out = next_step.left_out(attempts)
            left = gang.available(out) if outcome.came is None else outcome.came
            available = None if left is None else left + len(out)
            next_ = next_step.decide(attempts, wanted, run.gang.retries, available, gang.fits)
            gang.teller.follows(next_.line)
            if next_.action == "stop":
                kind, line = outcome.failure.kind, next_.line
                if kind == "memory":
                    line = f"{line}; {gang.job.advice or gang.advice(run)}".removesuffix("; ")
                raise Fault(line) if kind in ("user", "data", "memory") else Broken(line)
            gang.say(f"{outcome.failure.line}; {next_.line}")
            without = next_.without
            stay = outcome.kept if next_step.is_quick(attempts) else None
            kept = _staying(gang, run, stay, without) if stay else None
            if kept and len(kept.hosts) >= run.layout.nodes:
                gang.say(f"{', '.join(kept.hosts.values())} stay and continue at once")
                members.pop_all()
                continue
        kept = None
        if available is not None:
            run = gang.fits(next_.nodes) or wanted
        gang.pause(next_.wait)


def _staying(gang: Gang, run: Run, kept: Kept, without: tuple[str, ...]) -> Kept:
    """Return the hosts that may continue at once. Hosts to be left out stay if the engine has too few others."""
    usable = kept.usable(without)
    if len(usable.hosts) >= run.layout.nodes:
        return usable
    demand = Demand.of(run.changed(gang={"spares": 0}))
    lost = {*host_names(kept.lookout).values()} - {*kept.hosts.values()}  # the engine may not know it yet

    def enough(out: tuple[str, ...]) -> bool:
        others = gang.engine.available(demand, (*out, *lost))
        return others is None or others >= demand.nodes

    return kept.usable(spared(without, enough))


def _survived(gang: Gang, run: Run, without: tuple[str, ...], kept: Kept | None) -> Outcome:
    """Make an attempt, and turn an unexpected error into its failure.

    A store or a scheduler that does not answer now may answer for the next attempt.
    """
    try:
        return _attempt(gang, run, without, kept)
    except (Fault, Broken, Stopped):
        raise
    except Exception as error:
        gang.say(traceback.format_exc())
        return Outcome(Failure("network", f"network: no attempt: {type(error).__name__}: {error}", True))


def _attempt(gang: Gang, run: Run, without: tuple[str, ...], kept: Kept | None) -> Outcome:
    with turn(gang, run, without) if kept is None else contextlib.nullcontext(run) as run:
        handle = kept.handle if kept else None
        try:
            board, lookout = announce(gang, run, kept)
        except BaseException:
            if kept:
                kept.release()
            raise
        gang.teller.begins(board.attempt)
        try:
            nodes = run.layout.nodes + run.gang.spares
            start = gang.engine.start
            handle = kept.join(board.attempt) if kept else start(Demand.of(run), board, nodes, without)
            if missing := gather(gang, run, without, lookout, handle, kept):
                assert missing.failure
                _end(gang, run, lookout, handle, missing.failure.line, save=False)
                return missing
            hosts = go(gang, run, lookout, kept)
        except BaseException as error:
            _end(gang, run, lookout, handle, str(error) or type(error).__name__, save=False)
            raise
        finally:
            (gang.folder / "probe").unlink(missing_ok=True)
    try:
        job, link = gang.job, gang.store.link(board.place)
        gang.teller.trains(hosts, lookout.nodes, job.task(run).ranks, lookout.word.copied or job.newest())
        gang.say(f"attempt {board.attempt}: {', '.join(hosts.values())} {job.command}; logs in {link}")
        with spare_hosts.replaced(gang, run, lookout, handle, without):
            failure = _watch(gang, run, lookout, handle, hosts)
    except Stopped:
        _end(gang, run, lookout, handle, "cancelled", save=True)
        raise
    except BaseException as error:
        _end(gang, run, lookout, handle, f"{type(error).__name__}: {error}", save=False)
        raise
    saves = failure is not None and failure.kind == "preempted"
    stays = failure is not None and failure.kind in next_step.QUICK and job.stays
    _end(gang, run, lookout, handle, failure.line if failure else "done", save=saves, stays=stays)
    return Outcome(failure, kept=Kept.of(lookout, handle, tuple(hosts), failure) if failure and stays else None)


def _watch(gang: Gang, run: Run, lookout: Lookout, handle: Handle, hosts: dict[int, str]) -> Failure | None:
    """Watch an attempt until all members are done, or one has failed."""
    first: float | None = None
    gone: set[int] = set()
    needed = [*hosts][: gang.job.needed(run)]
    missed: set[int] = set()  # lost members that are not needed
    ended: dict[int, float] = {}  # when the engine first reported the end of a member
    while True:
        gang.pause(TICK)
        gang.tick()
        if lookout.lost:
            raise Broken(f"{lookout.board.place}: another controller has taken it over")
        lookout.check()
        now, was_read = time.monotonic(), lookout.was_read
        nodes = dict(lookout.nodes)
        states = {k: nodes[k].state for k in hosts}
        if gang.job.is_over(run, list(states.values())):
            return None if gang.is_done(lookout.board) else preempted(nodes)
        ended = {k: ended.get(k, now) for k, alive in handle.alive().items() if alive is False}
        over = {k for k, state in states.items() if state in ("done", "failed", "preempted", "stopped", "stopping")}
        # The last message of a member may be read after its end is known: it decides.
        left = {k for k in hosts if k not in over}
        gone = {k for k in left if ended.get(k, now) < was_read or lookout.silence(k) > run.gang.silent_after}
        if any(was_told(nodes[k]) for k in needed) and lookout.word.state == "go":
            # All hosts have to save for a complete checkpoint.
            lookout.say(state="stop", reason="a host is being shut down", save=True)
        failed = {k for k, state in states.items() if state not in ("running", "waiting", "done")}
        for k in sorted((gone | failed) - {*needed} - missed):
            missed.add(k)
            gang.say(f"{hosts[k]} {'no longer answers' if k in gone else 'has ended'}; the others continue without it")
        wrong = (gone | failed) & {*needed}
        if wrong and first is None:
            first = time.monotonic()
        sure = any(end.code == -signal.SIGKILL for k in wrong for end in nodes[k].failed)  # nothing explains it better
        if first is not None and (sure or time.monotonic() - first > SETTLE):
            if not wrong:  # the silent member is back
                first = None
                continue
            failure = of_attempt(run, lookout, {k: hosts[k] for k in needed}, gone, handle.words())
            # Ranks that lost a connection may be the first to report a lost host: the others must renew first.
            unheard = [k for k in left & {*needed} - gone if lookout.silence(k) > time.monotonic() - first]
            if failure.kind != "network" or not unheard:
                return failure


def _end(
    gang: Gang, run: Run, lookout: Lookout, handle: Handle | None, reason: str, save: bool, stays: bool = False
) -> None:
    """Stop an attempt. Returns when no rank can be alive, and with `stays` False no member."""
    lookout.say(state="stop", reason=reason, save=save, stays=stays)
    gang.teller.ends(reason)
    since = time.monotonic()
    while handle is not None:
        engine, nodes = handle.alive(), dict(lookout.nodes)
        over = {k for k, node in nodes.items() if node.over}
        left = [k for k in nodes if k not in over and engine.get(k) is not False]
        quiet = all(lookout.silence(k) > ENDED_BY_ITSELF for k in left)
        if not left or quiet or time.monotonic() - since > 2 * ENDED_BY_ITSELF:
            break
        time.sleep(TICK)
    if stays:
        return
    if handle is not None:
        handle.cancel()
    lookout.end(LEAVE_WITHIN)
