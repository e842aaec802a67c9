"""Heartbeat of a rank, for whoever watches it on this host: a thread writes signs of life to a file once a second.

The files are those of contract/signs_of_life.py; without their folder nothing is written. The thread falls silent when
the process is stopped, dead, or its interpreter is held by something that does not let go. A rank of a gang
(GANG_ATTEMPT) does not begin before all its world have said that name.
"""

import contextlib
import json
import os
import statistics
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from contract import signs_of_life
from contract.files import write_atomically

EVERY = 1.0
USUAL = 20  # steps whose median is the usual one
MEET_WITHIN = 300.0  # seconds; hosts start at once, but imports from a cold disk take minutes

signs: dict[str, Any] = {"phase": "starting", "step": 0, "usual": 0.0}
durations: list[float] = []


def begin() -> None:
    if signs_of_life.FOLDER not in os.environ:
        return
    signs.update(rank=int(os.environ["RANK"]), pid=os.getpid(), step_at=time.monotonic())
    _write()
    threading.Thread(target=_beat, daemon=True, name="life").start()


def phase(name: str) -> None:
    signs.update(phase=name, step_at=time.monotonic())


def step(number: int) -> None:
    """Note that a step has ended."""
    if signs["phase"] in signs_of_life.MEASURED:
        durations.append(time.monotonic() - signs["step_at"])
        del durations[:-USUAL]
        signs["usual"] = statistics.median(durations)
    signs["step"] = number
    phase("between steps")  # where saves happen, too


def over() -> None:
    """Note that this rank has made all that it was to make."""
    if signs_of_life.FOLDER in os.environ:
        phase(signs_of_life.OVER)
        _write()


def failed(error: BaseException) -> None:
    """Write down the error that this rank dies of."""
    if signs_of_life.FOLDER not in os.environ:
        return
    lines = traceback.format_exception(error)
    told = {"rank": signs.get("rank"), "step": signs["step"], "lines": "".join(lines).splitlines()[-30:]}
    with contextlib.suppress(OSError):
        _put(signs_of_life.error(signs.get("rank", 0)), told)


def meet() -> None:
    """Wait until all ranks of this attempt have sent its name to its master. A rank of a dead attempt never gets by."""
    name = os.environ.get("GANG_ATTEMPT")
    if not name:
        return
    from datetime import timedelta

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    phase("meeting")
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=MEET_WITHIN))
    key, until = f"gang/{name}", time.monotonic() + MEET_WITHIN
    count = store.add(key, 1)
    while count < world:
        if time.monotonic() > until:
            raise RuntimeError(f"{count} of {world} ranks of {name} met at {host}:{port} within {MEET_WITHIN:.0f} s")
        time.sleep(0.2)
        count = store.add(key, 0)
    phase("loading")


def callback():
    """Callback for Megatron-Bridge's loop that notes what the rank does."""
    from megatron.bridge.training.callbacks import Callback

    class Signs(Callback):
        def on_train_start(self, context) -> None:
            signs["step"] = self.first = context.state.train_state.step

        def on_train_step_start(self, context) -> None:
            first = signs["step"] == self.first  # compiles, allocates, connects: no measure of the usual one
            phase("first step" if first else "training")

        def on_train_step_end(self, context) -> None:
            step(context.state.train_state.step + 1)

        def on_eval_start(self, context) -> None:
            phase("validating")

        def on_train_end(self, context) -> None:
            phase("ending")

    return Signs()


def _beat() -> None:
    while True:
        time.sleep(EVERY)
        with contextlib.suppress(OSError):
            _write()


def _write() -> None:
    _put(signs_of_life.sign(signs["rank"]), signs | {"at": time.monotonic()})


def _put(name: str, content: dict[str, Any]) -> None:
    write_atomically(Path(os.environ[signs_of_life.FOLDER]) / name, json.dumps(content), durable=False)
