"""A conversion or export that dies: kill.json in paths.output says of which rank, and after how many units or seconds,
and of which journal the units are.

If "process" is in it, the process that packs the first file dies instead. Seconds count from the first unit on.
The file begun.txt in the same folder lists all started units.
"""

import importlib
import json
import os
import signal
import threading
import time
from pathlib import Path

from conf.schema.run import Run
from trainer.weights import atomic_folder, journal
from trainer.weights.packed_base import conversion as packed

SIZE = 2**14  # bytes, so that a tiny model has many units
SLOWER = 0.005  # seconds a unit
PACK = packed._packed


def main(run: Run) -> None:
    folder = Path(run.paths.output)
    wish = json.loads((folder / "kill.json").read_text())
    journal.SMALLEST = packed.LARGEST = SIZE
    do, dies = journal.do, wish.get("rank") in (None, atomic_folder.rank())

    def do_and_die(noted, sizes, is_whole, make, **ahead):
        done = 0
        if dies and "seconds" in wish:
            threading.Timer(wish["seconds"], die).start()

        def make_and_die(number: int):
            nonlocal done
            if dies and done == wish.get("units") and noted.name == wish.get("journal", noted.name):
                die()
            with (folder / "begun.txt").open("a") as begun:
                begun.write(f"{number}\n")
            time.sleep(SLOWER)
            done += 1
            return make(number)

        return do(noted, sizes, is_whole, make_and_die, **ahead)

    journal.do = do_and_die
    if "process" in wish:
        packed._packed = pack_or_die
    importlib.import_module(f"trainer.{wish['command']}").main(run)
    os._exit(0)  # no timer is waited for


def pack_or_die(form, source, tensor, file: str):
    return die() if file == packed._name(0) else PACK(form, source, tensor, file)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
