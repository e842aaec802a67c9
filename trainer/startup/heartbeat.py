"""Heartbeat of a rank, for the processes on this host that watch it: a thread writes a file once a second.

The files are those of contract/signs_of_life.py; without their folder nothing is written. The thread stops writing if
the process is stopped or dead, or if a call holds the interpreter's lock. A rank of a gang (GANG_ATTEMPT) does not
start its work before all ranks of this attempt have connected.

Rank 0 of a training also appends the seconds of each phase to a journal, from which the flow accounts for all time
(tasks/gang/history/spent.py).
"""

import contextlib
import json
import os
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from contract import signs_of_life
from contract.files import write_atomically

EVERY = 1.0
USUAL = 20  # last steps, of which the median duration is the usual one
MEET_WITHIN = 300.0  # seconds; hosts start at once, but imports from a cold disk take minutes

signs: dict[str, Any] = {"phase": "starting", "step": 0, "usual": 0.0}
durations: list[float] = []
seconds: dict[str, float] = {}  # of each phase since the last line of the journal
journals: list[Path] = []  # of this process: one or none


def begin() -> None:
    signs["step_at"] = time.monotonic()
    if signs_of_life.FOLDER not in os.environ:
        return
    signs.update(rank=int(os.environ["RANK"]), pid=os.getpid())
    _write()
    threading.Thread(target=_beat, daemon=True, name="life").start()


def phase(name: str) -> None:
    now = time.monotonic()
    seconds[signs["phase"]] = seconds.get(signs["phase"], 0.0) + now - signs.get("step_at", now)
    signs.update(phase=name, step_at=now)


def account(folder: Path, start: int) -> None:
    """Write the seconds of each phase to the journal in this folder from now on, in a training from step `start`."""
    phase("loading")
    signs["step"], attempt = start, os.environ.get("GANG_ATTEMPT", "").rpartition("-")[2]
    if os.environ["RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        journals[:] = [folder / signs_of_life.JOURNAL]
        _account(start=start, **({"attempt": int(attempt)} if attempt else {}))


def step(number: int) -> None:
    """Note that a step has ended."""
    if signs["phase"] in signs_of_life.MEASURED:
        durations.append(time.monotonic() - signs["step_at"])
        del durations[:-USUAL]
        signs["usual"] = statistics.median(durations)
    signs["step"] = number
    phase("between steps")
    _account()


def saved() -> None:
    """Note that a checkpoint is complete. Its save began when the last phase ended."""
    signs["phase"] = "saving"
    phase("between steps")
    _account(saved=True)


def over() -> None:
    """Note that this rank has finished its work."""
    phase(signs_of_life.OVER)
    _write()


def failed(error: BaseException) -> None:
    """Write the error that ends this rank."""
    lines = traceback.format_exception(error)
    content = {"rank": signs.get("rank"), "step": signs["step"], "lines": "".join(lines).splitlines()[-30:]}
    with contextlib.suppress(OSError):
        _put(signs_of_life.error(signs.get("rank", 0)), content)


def meet() -> None:
    """Wait until all ranks of this attempt have connected to its master. Ranks of an ended attempt never pass."""
    name = os.environ["GANG_ATTEMPT"]
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
    """Callback for Megatron-Bridge's loop that records the phase and the step of this rank."""
    from megatron.bridge.training.callbacks import Callback

    class Signs(Callback):
        def on_train_start(self, context) -> None:
            signs["step"] = self.first = context.state.train_state.step
            phase("between steps")

        def on_train_step_start(self, context) -> None:
            first = signs["step"] == self.first  # it compiles, allocates and connects: not a usual step
            phase("first step" if first else "training")

        def on_train_step_end(self, context) -> None:
            if signs["phase"] == "first step" and os.environ["LOCAL_RANK"] == "0":
                _put(signs_of_life.MODULES, [name for name in sys.modules if name != "__main__"])
            step(context.state.train_state.step + 1)

        def on_eval_start(self, context) -> None:
            phase("validating")

        def on_eval_end(self, context) -> None:
            phase("between steps")

        def on_checkpoint_save(self, context) -> None:
            saved()

        def on_train_end(self, context) -> None:
            phase("ending")
            _account()

    return Signs()


def _beat() -> None:
    while True:
        time.sleep(EVERY)
        with contextlib.suppress(OSError):
            _write()


def _write() -> None:
    _put(signs_of_life.sign(signs.get("rank", 0)), signs | {"at": time.monotonic()})


def _account(**facts: Any) -> None:
    """Append a line to the journal."""
    line = {"time": time.time(), "step": signs["step"], **facts}
    line["seconds"] = {name: round(spent, 4) for name, spent in seconds.items()}
    seconds.clear()
    for journal in journals:
        with contextlib.suppress(OSError), journal.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _put(name: str, content: dict[str, Any] | list[str]) -> None:
    if folder := os.environ.get(signs_of_life.FOLDER):
        write_atomically(Path(folder) / name, json.dumps(content), durable=False)
