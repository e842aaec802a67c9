"""A reference whose last rank dies once it has written a few parts.

The file `die` in paths.output says of how many, and of which signal. A part is a micro batch here. Each row that a
model was asked of is a line of asked.txt there.
"""

import os
from pathlib import Path

from conf.schema.run import Run
from trainer.reference import __main__ as command
from trainer.reference import parts


def main(run: Run) -> None:
    from trainer.reference import scoring

    folder, last = Path(run.paths.output), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    limit, number = -1, 0
    if last and (folder / "die").exists():
        limit, number = map(int, (folder / "die").read_text().split())
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
                os.kill(os.getpid(), number)
            written += 1
        write(self, last)

    parts.Parts.add, parts.Parts.write = noted, deadly
    command.main(run)
