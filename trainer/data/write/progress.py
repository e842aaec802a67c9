"""Progress of preparation: lines on the console, and a file for the process that started it."""

import json
import time
from pathlib import Path

from trainer.startup.console import say

PRINT_EVERY = 10.0  # seconds
WRITE_EVERY = 0.5


class Progress:
    def __init__(self, file: Path, total: int):
        self.file, self.total = file, total  # bytes to read; 0 = unknown
        self.printed = self.written = time.monotonic()
        self.begin("")

    def begin(self, phase: str) -> None:
        self.phase, self.done, self.fresh = phase, 0, 0
        self.start = time.monotonic()
        self.rows: dict[int, int] = {}

    def rows_of(self, parts: int) -> list[int]:
        """Return the numbers of rows read of each part in this phase."""
        return [self.rows.get(part, 0) for part in range(parts)]

    def update(self, part: int, size: int, rows: int, fresh: bool) -> None:
        """Count bytes and rows of a part. `fresh`: they were processed now, and not in an earlier attempt."""
        self.done += size
        self.fresh += size if fresh else 0
        self.rows[part] = self.rows.get(part, 0) + rows
        now = time.monotonic()
        if now - self.written >= WRITE_EVERY:
            self.written = now
            line = {"phase": self.phase, "done": self.done, "total": self.total, "rows": sum(self.rows.values())}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if now - self.printed >= PRINT_EVERY:
            self.printed = now
            say(f"prepare: {self.phase}: {self._reached(now)}")

    def _reached(self, now: float) -> str:
        rows = f"{sum(self.rows.values()):,} rows"
        if not self.total:
            return rows
        left = (self.total - self.done) * (now - self.start) / max(1, self.fresh)
        return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rows}, {left / 60:.1f} min left"
