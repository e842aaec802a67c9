"""trainer.train, whose saves are slow, fail or are interrupted, as wish.json in paths.output says.

slow: seconds that each thread needs more; full: rank whose disk is full; kill: rank that dies, `seconds` after its save
of number `save` begins, or, without `seconds`, before it marks a checkpoint. For test_background_saves.py.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    wish, rank = json.loads(Path(run.paths.output, "wish.json").read_text()), int(os.environ["RANK"])
    from trainer import train
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    from contract import checkpoints
    from trainer.training import background_saves

    files, save, mark, count = background_saves._files, background_saves.Saves.save, checkpoints.mark, 0

    def slow_files(writer):
        if wish.get("full") == rank:
            writer.write_buckets[0] = ("/dev/full", *writer.write_buckets[0][1:])
        time.sleep(wish.get("slow", 0))
        return files(writer)

    def save_and_die(*args, **kwargs):
        nonlocal count
        count += 1
        if (wish.get("kill"), wish.get("save")) == (rank, count):
            threading.Timer(wish["seconds"], die).start()
        return save(*args, **kwargs)

    def mark_and_die(*args, **facts):
        if wish.get("kill") == rank and "seconds" not in wish:
            die()
        mark(*args, **facts)

    background_saves._files, background_saves.Saves.save = slow_files, save_and_die
    checkpoints.mark = mark_and_die
    train.main(run)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
