"""Member of a gang's attempt on one host: it joins, waits for the start, runs the ranks, and ends all of them.

    python -m tasks.run.guard --grace=S python -m tasks.gang.member --store URI --gang ID --attempt N --node K

Every engine starts it with this command, with standard input held open; guard and member end when their starter ends.
Credentials of the store come from this host's environment.

It ends within seconds if the controller stops the attempt, if the controller is silent while the store answers, if a
later attempt exists, if its starter ends, or if it reaches neither the store nor a witness. An outage of the store
alone does not end it. Exit code 0: done, or stopped on request; 1: failed.

GANG_ADDRESS sets the address at which others reach this host, if the detected one is wrong. GANG_HOST sets the host's
name, for containers with another hostname. GANG_PLACE sets its position in the network (conf/network.py, rank_order);
its default comes from Slurm.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from conf.host import gpu_locks, nvidia_smi
from conf.load import as_yaml, load
from conf.schema.run import Run
from contract.faults import Fault, Stopped
from contract.processes import started
from contract.signs_of_life import MODULES
from tasks.gang import own_files, peer_probe
from tasks.gang.board import Board
from tasks.gang.copier import Copier
from tasks.gang.copies import Copies
from tasks.gang.diagnosis.host_evidence import Host
from tasks.gang.job import JOBS, Training
from tasks.gang.member_link import Link
from tasks.gang.messages import End, Member, Standing, Task, Word
from tasks.gang.ranks import WRITES, Ranks, environment_of
from tasks.gang.results import Results
from tasks.gang.torchrun import Torchrun
from tasks.store import open_store

TICK = 0.3
REPORTED = 10.0  # seconds between reports of steps
LAST_WORDS = 8.0  # seconds for the last report and logs
LAST_COPY = 10.0  # seconds in which the members of a failed attempt finish the copy of a checkpoint


def main() -> int:
    options = _arguments()
    ending = Ending(options.starter)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ending.set())
    store, attempt, code = open_store(options.store, hasty=True), options.attempt, 0
    folder = Path(tempfile.mkdtemp(prefix="gang-"))
    torchrun = Torchrun(folder)
    try:
        while attempt:
            board, work = Board(store, options.gang, attempt), folder / str(attempt)
            if attempt == options.attempt and not _take_gpus(board, ending):
                print(f"{board.place}: over")
                return 1
            work.mkdir()
            code, attempt = _take_part(board, options.node, work, ending, torchrun, attempt != options.attempt)
            shutil.rmtree(work, ignore_errors=True)
        return code
    except Fault as fault:
        print(fault, flush=True)
        return 1
    finally:
        torchrun.end()
        shutil.rmtree(folder, ignore_errors=True)


class Ending(threading.Event):
    """A signal that ends this process, or the end of a process that started it."""

    def __init__(self, starters: list[str]):
        super().__init__()
        self.starters = starters

    def why(self) -> str:
        """The reason why this process has to end; empty if there is none."""
        if self.is_set():
            return "ended by a signal"
        for starter in self.starters:
            pid, _, born = starter.partition(":")
            if started(int(pid)) != born:
                return f"its starter, process {pid}, is gone"
        return ""


def _take_part(
    board: Board, node: int, folder: Path, ending: Ending, torchrun: Torchrun, stayed: bool
) -> tuple[int, int]:
    """Take part in an attempt. Returns the exit code, and the attempt that this host continues with, or 0."""
    host = os.environ.get("GANG_HOST") or socket.gethostname()
    link = Link(board, node, Member(secrets.token_hex(8), host, "waiting"))
    port = peer_probe.serve(lambda: Standing(board.gang, board.attempt, link.word.state))
    first = board.pulse()
    if first is None:
        print(f"{board.place}: no such attempt")
        return 1, 0
    met = peer_probe.reached(first[0].addresses, first[0].port)
    address = os.environ.get("GANG_ADDRESS") or (met[1] if met else peer_probe.addresses()[0])
    link.say(
        address=address,
        port=port,
        master_port=peer_probe.free_port(),
        probe=_probe(first[0]),
        place=os.environ.get("GANG_PLACE") or os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
    )
    link.met, link.stayed = met is not None, stayed
    if not link.join():
        print(f"{board.place}: over, or another process is member {node}")
        return 1, 0
    print(f"member {node} of {board.place} on {host} ({address})", flush=True)
    while not (why := ending.why() or link.why_stop()) and node not in link.word.order:  # a spare host stays here
        _prepare(board, link, folder, torchrun)
        time.sleep(TICK / 3)
    if not why:
        try:
            why, code = _train(link, board, node, folder, ending, torchrun)
        except Stopped as stopped:
            why, code = str(stopped), 0
            state, told = ("preempted", True) if ending.is_set() else ("stopped", False)
            link.say(state=state, told=told, reason=why, over=True)
        except Exception as error:  # of this host, before its ranks began; post_mortem() reports failed ranks
            lines = "".join(traceback.format_exception(error)).splitlines()[-30:]
            end = End(rank=-1, code=1, step=0, lines=tuple(lines), silent=False, state="", stalled=False)
            link.say(state="failed", failed=(end,))
            why, code = lines[-1], 1
    else:
        link.say(state="stopped", reason=why, over=True)
        code = 0
    print(f"member {node} of {board.place}: {why}", flush=True)
    next_attempt = _next_attempt(link, node, ending) if link.message.over and link.message.state != "done" else 0
    link.end(LAST_WORDS)
    return code, next_attempt


def _next_attempt(link: Link, node: int, ending: Ending) -> int:
    """Wait for the controller's decision. Returns the attempt that this host continues with, or 0."""
    while not (ending.why() or link.why_leave()):
        word = link.word
        if word.closed or (word.state == "stop" and not word.stays):
            return word.next if node in word.again else 0
        time.sleep(TICK)
    return 0


def _prepare(board: Board, link: Link, folder: Path, torchrun: Torchrun) -> None:
    """Prepare this host for its ranks while it waits: they import what others do, or did in the last attempt."""
    if torchrun.prepared or time.monotonic() - torchrun.asked < REPORTED:
        return
    torchrun.asked = time.monotonic()
    with contextlib.suppress(OSError, ConnectionError):  # the store does not answer
        other = board if link.word.order else Board(board.store, board.gang, board.attempt - 1)
        order = link.word.order or (other.read("gang.json") or {}).get("order")
        modules = other.text(f"logs/{order[0]}/{MODULES}.00000") if order else ""
        task, conf = board.message(Task, "task.json"), folder / "next.yaml"
        conf.write_text(board.text("resolved.yaml"))
        if modules and task:
            torchrun.prepare(modules.encode(), environment_of(load(conf), task, link.message.address), task.ranks)


def _train(link: Link, board: Board, node: int, folder: Path, ending: Ending, torchrun: Torchrun):
    word = link.word
    conf = folder / "resolved.yaml"
    conf.write_text(board.text("resolved.yaml"))
    run = load(conf)
    task = board.message(Task, "task.json")
    assert task, "the controller writes it before the attempt exists"
    name, place = f"{board.gang}-{board.attempt}", word.order.index(node)
    copier = None
    if word.runs:
        run, copier = _own_files(link, run, task, place, ending)
        conf.write_text(as_yaml(run))
    host = Host()
    ranks = Ranks(name, conf, run, task, word, place, link.message.address, folder / "run", torchrun)
    link.say(state="running")
    reported, grace, why, look = time.monotonic(), 0.0, "", "running"
    while look == "running":
        time.sleep(TICK)
        link.logs = _shipped(ranks, copier, task, place)
        if why := ending.why() or link.why_stop():
            grace = run.gang.grace if ending.is_set() or link.word.save else 0.0
            break
        look = ranks.look()
        if time.monotonic() - reported > REPORTED:
            reported = time.monotonic()
            link.say(ranks=tuple(ranks.signs()), free=ranks.free_disk())
        if JOBS[task.command].stays and not torchrun.prepared and ranks.modules.exists():
            torchrun.prepare(ranks.modules.read_bytes(), environment_of(run, task, link.message.address), task.ranks)
    if look == "failed":
        failed = tuple(ranks.post_mortem())
        link.say(state="failed", failed=failed, free=ranks.free_disk(), **host.evidence())
        ranks.end(0)
        _copy_the_rest(copier, ending)
        link.say(over=True)
        return "failed: " + "; ".join(f"rank {end.rank} code {end.code}" for end in failed), 1
    if look == "done":
        ranks.end(0)
        if copier:
            copier.finish(True, lambda: bool(ending.why() or link.why_stop()))
            if why := ending.why() or link.why_stop():
                link.say(state="stopped", reason=why, over=True)
                return why, 0
            if node in word.apart:
                copier.remove()
        link.say(state="done", over=True)
        return "done", 0
    link.say(state="stopping", reason=why, told=ending.is_set(), ranks=tuple(ranks.signs()))
    ranks.end(grace)
    _copy_the_rest(copier, ending)
    link.say(state="preempted" if ending.is_set() else "stopped", reason=why, over=True)
    return why, 0


def _shipped(ranks: Ranks, copier: Copier | Results | None, task: Task, place: int) -> dict[str, Path]:
    """Files that the board gets. The first host's modules are for spare hosts, which may join the attempt later."""
    modules = {MODULES: ranks.modules} if place == 0 and JOBS[task.command].stays else {}
    return ranks.logs() | (copier.logs() if copier else {}) | modules


def _own_files(link: Link, run: Run, task: Task, place: int, ending: Ending) -> tuple[Run, Copier | Results]:
    """Fetch the files that this host lacks, and wait until all hosts have theirs."""

    def stop() -> str:
        return ending.why() or link.why_stop()

    word, store = link.word, open_store(link.board.store.uri)
    progress = own_files.reporting(link.say, stop)
    run = own_files.local_run(run, Path(word.runs), store, progress)
    output, job = Path(getattr(run.paths, WRITES[task.command])), JOBS[task.command]
    if job is Training:
        own_files.resume(run, Copies(store, link.board.gang), word.copied, place == 0, progress)
    link.say(ready=True)
    while not link.word.start:
        if why := stop():
            raise Stopped(why)
        time.sleep(TICK)
    ranks = range(place * task.ranks, (place + 1) * task.ranks)
    if job is Training:
        return run, Copier(link, output, ranks, place == 0, job.followed)
    return run, Results(link, output, place == 0, job.followed)


def _copy_the_rest(copier: Copier | Results | None, ending: Ending) -> None:
    """Finish the copy under way before the attempt ends: the next one then repeats fewer steps."""
    until = time.monotonic() + (LAST_WORDS if ending.is_set() else LAST_COPY)
    if copier:
        copier.finish(False, lambda: time.monotonic() > until)


def _take_gpus(board: Board, ending: Ending) -> bool:
    """Wait until this host's GPUs are free and lock those that the ranks will use, until this process ends.

    The member joins the attempt only afterwards. Returns False if the attempt no longer waits for it.
    """
    if not nvidia_smi.visible():
        return True
    task = board.message(Task, "task.json")
    assert task, "the controller writes it before the attempt exists"

    def over() -> bool:
        if ending.why():
            return True
        try:
            word = board.pulse()
        except Exception:  # the store does not answer
            return False
        return word is None or word[0].state == "stop"

    def say(line: str) -> None:
        print(line, flush=True)

    hold = gpu_locks.take(f"gang {board.gang}", say, over, count=task.gpus)
    os.environ.update(hold.environment if hold else {})
    return hold is not None


def _probe(word: Word) -> str:
    """Content of the controller's probe file on this host. It proves that both use the same storage."""
    try:
        return Path(word.probe).read_text()
    except OSError:
        return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks.gang.member", description=__doc__.partition("\n")[0])
    parser.add_argument("--store", required=True)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--node", required=True, type=int, help="0 to nodes - 1")
    parser.add_argument("--starter", action="append", default=[], metavar="PID:STARTED", help="ends with this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
