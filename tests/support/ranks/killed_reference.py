"""A reference whose last rank dies once it has written a few parts, as many as the file `die` in paths.output says.

A part is a micro batch here. Each row that a model was asked of is a line of asked.txt there.
"""

import os
import signal
from pathlib import Path

from conf.schema.run import Run
from trainer.reference import __main__ as command
from trainer.reference import parts


def main(run: Run) -> None:
    from trainer.reference import scoring

    folder, last = Path(run.paths.output), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    limit = int((folder / "die").read_text()) if last and (folder / "die").exists() else None
    parts.SHARE = parts.LEAST = 0.0
    scoring.AT_ONCE = 1
    add, write, written = parts.Parts.add, parts.Parts.write, 0

    def noted(self: parts.Parts, row: int, *found: object) -> None:
        with (folder / "asked.txt").open("a") as asked:
            asked.write(f"{self.split} {row}\n")
        add(self, row, *found)  # pyright: ignore[reportArgumentType]

    def deadly(self: parts.Parts, last: bool = False) -> None:
        nonlocal written
        if self.rows:
            if written == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            written += 1
        write(self, last)

    parts.Parts.add, parts.Parts.write = noted, deadly
    command.main(run)
