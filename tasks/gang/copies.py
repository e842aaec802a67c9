"""Copies of a training's checkpoints in the store, for hosts that do not share FINETUNE_RUNS.

<stage>/<fingerprint>/files/checkpoints/iter_N/...   files, at their place in the artifact
gangs/<gang>/<attempt>/parts/<N>/<k>.json            record of the files that member k has copied
gangs/<gang>/copies/<N>/...                          small files: its mark, metrics, parity records
gangs/<gang>/copies/<N>.json                         record of all its files, written last: it is complete
"""

import json
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contract import checkpoints
from contract.files import write_atomically
from tasks.gang.board import Board
from tasks.store import File, Store

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Copies:
    store: Store
    gang: str

    @property
    def files(self) -> str:
        """Place of the artifact's files in the store."""
        return f"{self.gang.replace('-', '/', 1)}/files"

    def place(self, step: int) -> str:
        """Place of the record of a checkpoint."""
        return f"{self._folder}/{step}.json"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        names = self.store.keys(self._folder)
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"(\d+)\.json", name)))

    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 if there is none."""
        return max(self.steps(), default=0)

    def record(self, step: int) -> dict[str, File]:
        """Files of a complete checkpoint, by their names in the artifact."""
        return {name: File(**file) for name, file in self._record(step).get("files", {}).items()}

    def at(self, step: int) -> float:
        """Time when a checkpoint became complete, by the clock of the flow's host; 0 if it is not in the store."""
        return self._record(step).get("at", 0.0)

    def mark(self, step: int) -> dict[str, Any]:
        """The mark of a complete checkpoint: the facts of the first host's mark, and the files of all hosts."""
        entry = self.store.read(f"{self._folder}/{step}/{_of(step)}/{checkpoints.MARK}")
        facts, prefix = json.loads(entry[0]) if entry else {}, f"{_of(step)}/"
        return facts | {"files": {name.removeprefix(prefix): file.size for name, file in self.record(step).items()}}

    def best(self, steps: Iterable[int]) -> int | None:
        """The step with the lowest validation loss; None if none was validated."""
        losses = {step: self.mark(step).get("validations", {}).get("loss") for step in steps}
        return min((step for step, loss in losses.items() if loss is not None), key=lambda s: losses[s], default=None)

    def complete(self, step: int, board: Board, members: Iterable[int]) -> dict[str, File] | None:
        """Record a checkpoint if the parts of all members are in the store. Returns its files, else None."""
        entries = [self.store.read(f"{board.place}/{part(step, k)}") for k in members]
        files = {f"{_of(step)}/{name}": file for entry in entries if entry for name, file in decoded(entry[0]).items()}
        if None in entries:
            return None
        record = {"at": time.time(), "files": {name: asdict(file) for name, file in files.items()}}
        self.store.write(self.place(step), json.dumps(record).encode())
        return files

    def write_small(self, step: int, name: str, data: bytes) -> None:
        self.store.write(f"{self._folder}/{step}/{name}", data)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; its record first: nobody then resumes from a part of it."""
        self.store.remove(self.place(step))
        self.store.delete(f"{self.files}/{_of(step)}")
        self.store.delete(f"{self._folder}/{step}")

    def forget(self) -> None:
        """Remove all copies, before the training begins again."""
        for step in reversed(self.steps()):
            self.remove(step)

    def needed(self, keep: int | None, keep_best: bool) -> list[int]:
        """Steps of the checkpoints that a run needs: the newest ones, and the best one."""
        steps = self.steps()
        kept = steps[-keep:] if keep else steps
        best = self.best(steps) if keep_best else None
        return sorted({*kept, *([] if best is None else [best])})

    def fetch_small(self, step: int, output: Path) -> None:
        """Write the metrics until this step, and the other small files."""
        folder = f"{self._folder}/{step}"
        for name in self.store.keys(folder):
            if not name.startswith(f"{CHECKPOINTS}/") and (entry := self.store.read(f"{folder}/{name}")):
                lines = entry[0].splitlines(keepends=True)
                data = b"".join(line for line in lines if _is_until(line, step)) if name == METRICS else entry[0]
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(output / name, data, durable=True)

    def write_trackers(self, step: int, output: Path) -> None:
        """Write Megatron-Bridge's files that name the newest checkpoint."""
        if entry := self.store.read(f"{self.files}/{_of(step)}/train_state.pt"):
            write_atomically(output / CHECKPOINTS / "latest_train_state.pt", entry[0], durable=True)
        write_atomically(output / CHECKPOINTS / "latest_checkpointed_iteration.txt", str(step), durable=True)

    def write_mark(self, step: int, mark: bytes) -> None:
        """Write the first host's mark."""
        self.write_small(step, f"{_of(step)}/{checkpoints.MARK}", mark)

    def put_mark(self, step: int, output: Path) -> None:
        """Write the mark of a complete checkpoint on a host's disk."""
        folder = output / _of(step)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / checkpoints.MARK, json.dumps(self.mark(step), indent=1), durable=True)

    def deliver(self, output: Path) -> dict[str, File]:
        """Write the small files of a finished training, and return the files of all its checkpoints in the store."""
        steps = self.steps()
        remove_others(output, steps)
        for step in steps:
            self.put_mark(step, output)
        self.write_trackers(steps[-1], output)
        self.fetch_small(steps[-1], output)
        return {name: file for step in steps for name, file in self.record(step).items()}

    def _record(self, step: int) -> dict[str, Any]:
        entry = self.store.read(self.place(step))
        return json.loads(entry[0]) if entry else {}

    @property
    def _folder(self) -> str:
        return f"gangs/{self.gang}/copies"


def part(step: int, node: int) -> str:
    """Name on the board of the record of a member's part."""
    return f"parts/{step}/{node}.json"


def encoded(files: dict[str, File]) -> bytes:
    return json.dumps({name: asdict(file) for name, file in files.items()}).encode()


def decoded(data: bytes) -> dict[str, File]:
    return {name: File(**file) for name, file in json.loads(data).items()}


def remove_others(output: Path, steps: Iterable[int]) -> None:
    """Remove the folders of all other checkpoints from a host's disk."""
    kept = {checkpoints.step_folder(output / CHECKPOINTS, step).name for step in steps}
    for folder in (output / CHECKPOINTS).glob("iter_*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _of(step: int) -> str:
    return str(checkpoints.step_folder(Path(CHECKPOINTS), step))


def _is_until(line: bytes, step: int) -> bool:
    """Whether a line of metrics is complete and not of a later step."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False
