"""Spare hosts of an attempt under way: hosts that become free join it, until gang.spares wait again.

    with replaced(gang, run, lookout, handle, without): ...

The attempt may have fewer spare hosts than gang.spares: there were too few hosts at its start, the last attempt has
used one, or one was lost. A thread then asks the engine for one more member, until a host is free. It needs the
engine's another(). With other engines a gang gets its spare hosts back when it starts again.

Members that have ranks are left to the controller. When the attempt ends, they may stay for the next one.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator

from conf.schema.run import Run
from tasks.gang.attempt import Gang, alone
from tasks.gang.board import STALE
from tasks.gang.controller_link import Lookout
from tasks.gang.engines import Demand, Handle

LOOKED = 10.0  # seconds between two looks
LONGEST = 600.0  # and after members that did not join, each time twice as long


@contextlib.contextmanager
def replaced(gang: Gang, run: Run, lookout: Lookout, handle: Handle, without: tuple[str, ...]) -> Iterator[None]:
    spares = gang.run.gang.spares
    if not spares or not hasattr(gang.engine, "another"):
        yield
        return
    over = threading.Event()
    whole = run.changed(gang={"spares": spares})
    # Prefect links the runs that it starts to the flow run of the context.
    target, arguments = contextvars.copy_context().run, (_replace, gang, whole, lookout, handle, without, over)
    threading.Thread(target=target, args=arguments, daemon=True, name="spare hosts").start()
    try:
        yield
    finally:
        over.set()


def _replace(
    gang: Gang, run: Run, lookout: Lookout, handle: Handle, without: tuple[str, ...], over: threading.Event
) -> None:
    demand, said, pause = Demand.of(run), "", LOOKED
    started: dict[int, float] = {}  # when members were started that have not joined yet
    while not over.wait(pause):
        nodes, order = dict(lookout.nodes), {*lookout.word.order}
        if lookout.word.state != "go" or any(nodes[k].over for k in order):
            continue  # the attempt ends
        for k in started.keys() & nodes.keys():
            gang.say(f"{nodes[k].host} has joined attempt {lookout.board.attempt} as a spare host")
            pause = LOOKED
        here = order | {k for k, node in nodes.items() if not node.over and lookout.silence(k) < STALE}
        ended = {k for k, alive in handle.alive().items() if alive is False}
        late = time.monotonic() - run.gang.start_within
        failed = {k for k, at in started.items() if k not in nodes and (k in ended or at < late)}
        pause = min(LONGEST, 2 * pause) if failed else pause
        started = {k: at for k, at in started.items() if k not in nodes.keys() | failed}
        if len(here) + len(started) >= demand.nodes:
            continue
        lost = {*handle.alive()} - here - {*started}
        try:
            with alone(gang, demand, over.is_set):
                if (k := gang.engine.another(demand, lookout.board, handle, without, lost)) is not None:
                    started[k] = time.monotonic()
        except Exception as error:  # the engine or the store may answer the next time
            if not over.is_set() and (line := f"no spare host: {type(error).__name__}: {error}") != said:
                gang.say(said := line)
