"""A training that dies while it reads the release: kill.json in paths.logs says which rank does, and at which piece.

Each rank writes the number of pieces that it has read into read-<rank>.txt beside it.
"""

import json
import os
import signal
from pathlib import Path

from conf.schema.run import Run
from trainer import train
from trainer.weights import atomic_folder


def main(run: Run) -> None:
    from trainer.weights.conversion.unwritten import Pieces

    folder, rank, done = Path(run.paths.logs), atomic_folder.rank(), 0
    wish, part = json.loads((folder / "kill.json").read_text()), Pieces.part

    def part_or_die(*asked):
        nonlocal done
        if wish.get("rank") == rank and wish["pieces"] == done:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        (folder / f"read-{rank}.txt").write_text(str(done))
        return part(*asked)

    Pieces.part = part_or_die
    train.main(run)
