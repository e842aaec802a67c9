"""Print the output of a run over several hosts (a gang), while it runs or afterwards.

    python -m flows.logs                                   gangs, newest first, their time and how each attempt ended
    python -m flows.logs train-6a8e                        rank 0 of the newest attempt
    python -m flows.logs train-6a8e --attempt 1 --rank 17 --err --tail 50
    python -m flows.logs train-6a8e --host node7           all ranks of that host
    python -m flows.logs train-6a8e --torchrun             output of torchrun on each host
    python -m flows.logs --follow                          print new lines, also of the next attempt

Name a gang by its fingerprint or the beginning of it, by its configuration, or by its flow run. Without a name, options
apply to the newest gang. FINETUNE_STORE and FINETUNE_RUNS are the same as for the flow. Exit code: 0; 2 if there is no
such gang, attempt or rank.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from difflib import get_close_matches
from functools import partial

from contract import closed_pipe
from contract.faults import Fault
from flows import arguments
from tasks.gang.board import Board, newest_attempt
from tasks.gang.history import logs, spent, timeline
from tasks.gang.history.logs import Log
from tasks.gang.history.timeline import DONE, Attempt, History, Host
from tasks.run import lease
from tasks.run.places import open_run_store
from tasks.store import Store

POLLED = 1.0
AGAIN_WITHIN = 20.0  # seconds within which a flow retries a failed task
SHOWN = 8  # attempts of a gang in the list, and hosts


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options, store = _arguments(argv), open_run_store()
    if options == _arguments([]):
        print("\n".join(listing(store)))
        return 0
    show = following if options.follow else whole
    try:
        for line in show(store, _named(store, options.gang), options):
            print(line, flush=options.follow)
    except KeyboardInterrupt:
        return 130
    return 0


def listing(store: Store) -> Iterator[str]:
    gangs = timeline.every(store)
    if not gangs:
        yield f"no gang has trained yet, in {store.uri}"
    silent = _silent(store, gangs)
    for told in gangs:
        names = [host.name for host in told.hosts]
        hosts = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        state = "no flow controls it" if told.gang in silent else timeline.state(told)
        yield f"{told.gang}  {told.run}  {told.flow}  {state}"
        yield f"    hosts {hosts or 'have not joined yet'}"
        if time_spent := spent.text(told.seconds):
            yield f"    time {time_spent}"
        attempts = timeline.settled(told)
        if len(attempts) > SHOWN:
            yield f"    {len(attempts) - SHOWN} earlier attempts"
        yield from (f"    {_line(one)}" for one in attempts[-SHOWN:])


def whole(store: Store, gang: str, options: argparse.Namespace) -> Iterator[str]:
    number, hosts = _attempt(store, gang, options.attempt)
    yield from _lines(_sources(Board(store, gang, number), hosts, options), options.tail, lambda: True)


def following(store: Store, gang: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of one attempt after the other, until no further attempt will follow."""
    number = options.attempt or max(1, newest_attempt(store, gang))
    tail = options.tail
    while True:
        board = Board(store, gang, number)
        if hosts := _gathered(board):
            yield from _lines(_sources(board, hosts, options), tail, partial(_closed, board))
        else:
            _say(f"attempt {number} ended before all hosts had joined")
        if options.attempt or not _another(store, gang, number):
            return
        number, tail = number + 1, None


def _lines(sources: list[Log], tail: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of the logs, each log under its title if there are several, until no more lines will follow."""
    shown: Log | None = None
    while True:
        over = is_over()  # asked before the logs: the last lines are shipped before the attempt is closed
        for log in sources:
            for line in _new(log, tail, over):
                if shown is not log and len(sources) > 1:
                    yield f"==> {log.title} <=="
                shown = log
                yield line
        tail = None
        if over:
            return
        time.sleep(POLLED)


def _gathered(board: Board) -> tuple[Host, ...]:
    """Return the hosts of an attempt once all have joined; empty if the attempt ends before that."""
    if not _hosts(board) and not _closed(board):
        _say(f"attempt {board.attempt} waits for its hosts")
    while not (hosts := _hosts(board)) and not _closed(board):
        time.sleep(POLLED)
    return hosts


def _another(store: Store, gang: str, number: int) -> bool:
    """Wait for the next attempt. Return False once it is known that none will follow."""
    since, told = None, False
    while not store.read(f"gangs/{gang}/{number + 1}/gang.json"):
        known = timeline.read(store, gang)
        if known is None or (known.end and known.attempts[-1].number <= number):
            since = since or time.monotonic()
            patience = 0.0 if known and known.end == DONE else AGAIN_WITHIN
            if time.monotonic() - since >= patience:
                _say(f"{gang}: {timeline.state(known) if known else 'no more attempts'}")
                return False
        elif not told:
            ended = next((one for one in known.attempts if one.number == number), None)
            _say(f"attempt {number}: {ended.how}; {ended.next}" if ended else f"attempt {number} has ended")
            told = True
        time.sleep(POLLED)
    return True


def _closed(board: Board) -> bool:
    """Return whether the attempt is over: its controller has closed it, or a later attempt exists."""
    word = board.read("gang.json") or {}
    later = board.store.read(f"gangs/{board.gang}/{board.attempt + 1}/gang.json")
    return bool(word.get("closed") or later)


def _new(log: Log, tail: int | None, over: bool) -> Iterator[str]:
    """Yield the new lines of a log, or only the last `tail` of them. A line without an end counts once it is over."""
    if tail is None:
        yield from log.lines()
    last = [] if tail is None else log.tail(tail)
    last += log.unended() if over else []
    yield from deque(last, tail)


def _sources(board: Board, hosts: tuple[Host, ...], options: argparse.Namespace) -> list[Log]:
    kind = "err" if options.err else "out"
    if options.torchrun:
        found = [logs.of_torchrun(board, host) for host in hosts]
    elif options.host is not None:
        names = [host.name for host in hosts]
        if options.host not in names:
            raise Fault(f"--host: {options.host}: no host of attempt {board.attempt}; {_nearest(options.host, names)}")
        found = logs.of_host(board, hosts[names.index(options.host)], kind)
    else:
        rank = options.rank or 0
        one = logs.of_rank(board, hosts, rank, kind)
        if one is None:
            last = hosts[-1].first + hosts[-1].ranks - 1
            raise Fault(f"--rank: {rank} is not a rank of attempt {board.attempt}, which has 0 to {last}")
        found = [one]
    of = f", {found[0].title}, {'stderr' if options.err else 'stdout'}" if len(found) == 1 else ""
    _say(f"{board.gang}, attempt {board.attempt}{of}")
    return found


def _attempt(store: Store, gang: str, wanted: int | None) -> tuple[int, tuple[Host, ...]]:
    """Return the requested attempt and its hosts; by default the newest attempt that has hosts."""
    newest = newest_attempt(store, gang)
    if wanted is not None and not 1 <= wanted <= newest:
        raise Fault(f"--attempt: {wanted}: {gang} has {f'1 to {newest}' if newest else 'none'}")
    for number in [wanted] if wanted else range(newest, 0, -1):
        if hosts := _hosts(Board(store, gang, number)):
            return number, hosts
    if wanted:
        raise Fault(f"--attempt: {wanted}: not all of its hosts have joined, and no rank has started")
    raise Fault(f"{gang}: no rank has started yet; --follow waits for it")


def _hosts(board: Board) -> tuple[Host, ...]:
    known = timeline.read(board.store, board.gang)
    told = [one.hosts for one in known.attempts if one.number == board.attempt] if known else []
    return (told[0] if told else ()) or logs.hosts_of(board)


def _named(store: Store, name: str | None) -> str:
    gangs = timeline.every(store)
    if name is None:
        if not gangs:
            raise Fault(f"no gang has trained yet, in {store.uri}")
        return gangs[0].gang
    part = name.replace("train/", "train-")
    found = [one for one in gangs if one.gang.startswith((part, f"train-{part}"))] if part else []
    found = found or [one for one in gangs if name in (one.run, one.flow)]
    if len(found) == 1:
        return found[0].gang
    if not found and "/" not in part and store.read(f"gangs/{part}/1/gang.json"):
        return part  # a gang whose controller has written no history
    if found:
        several = ", ".join(f"{one.gang} ({one.flow})" for one in found[:SHOWN])
        raise Fault(f"{name}: names {len(found)} gangs, the newest first: {several}")
    names = [word for one in gangs for word in (one.gang, one.run, one.flow)]
    raise Fault(f"{name}: no such gang; {_nearest(part, names)}")


def _nearest(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    meant = f"did you mean {near[0]}? " if near else ""
    there = list(dict.fromkeys(names))
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    return f"{meant}there {'are' if len(there) != 1 else 'is'} {', '.join(there[:SHOWN]) or 'none'}{more}"


def _silent(store: Store, gangs: list[History]) -> set[str]:
    """Return active gangs whose lease nobody renews. The function watches the leases, because clocks may differ."""
    leases = {told.gang: f"{told.gang.replace('train-', 'train/', 1)}/lease.json" for told in gangs if not told.end}
    first = {gang: store.read(key) for gang, key in leases.items()}
    silent = {gang for gang, key in leases.items() if not lease.holder(store, key)}
    waiting, until = {*leases} - silent, time.monotonic() + 2 * lease.RENEWED
    while waiting and time.monotonic() < until:
        time.sleep(POLLED / 2)
        waiting = {gang for gang in waiting if store.read(leases[gang]) == first[gang]}
    return silent | waiting


def _line(one: Attempt) -> str:
    began = datetime.fromtimestamp(one.began).strftime("%Y-%m-%d %H:%M")
    steps = f"steps {one.start} to {one.reached}" if one.ended else f"from step {one.start}"
    how = f"{one.how}{'; ' if one.next else ''}{one.next}" if one.ended else "trains" if one.hosts else "gathers"
    return f"{one.number:>3}  {began}  {f'{steps}  ' if one.hosts else ''}{how}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.logs()
    options = parser.parse_args(argv)
    if options.tail is not None and options.tail < 0:
        parser.error(f"--tail: {options.tail} is not a number of lines")
    if options.torchrun and options.err:
        parser.error("--err: torchrun has one log")
    return options


if __name__ == "__main__":
    closed_pipe.run(main)
