"""Scores of prepared rows by another model: files of trainer.reference, which training reads.

    <split>.npy                        dpo: float32 [rows, 2], log-probability of the chosen answer and of the rejected
    <split>-values.npy, -ids.npy       distill: float32 and int32 [learned tokens, top k], log-probabilities and tokens
    <split>-starts.npy                 int64 [rows + 1], where the tokens of each row begin
    references.json                    written last: of which rows, by which base or how many tokens

A training whose rows or base are others refuses them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.rules import objectives
from conf.schema.run import Run
from contract import checkpoints, json_object, regular_files
from contract.faults import Fault
from contract.files import open_atomically, write_atomically
from trainer.data import prepared
from trainer.data.identity import MANIFEST, digest

MARK = "references.json"
AGAIN = "python -m trainer.reference makes it"


@dataclass(frozen=True)
class Likeliest:
    """Tokens that a teacher holds likeliest, of all rows of a split."""

    values: np.ndarray
    ids: np.ndarray
    starts: np.ndarray

    @property
    def k(self) -> int:
        return self.values.shape[1]

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and tokens at the places of a row that are learned."""
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return self.values[part], self.ids[part]


def wanted(run: Run) -> dict[str, Any]:
    """The facts of the references that a run needs. A training does not have the teacher's base."""
    facts = {"objective": run.train.objective, "rows": digest(prepared.folder(run) / MANIFEST)}
    facts["precision"] = run.train.precision
    if objectives.has_teacher(run):
        return facts | {"top_k": run.train.teacher_top_k, "temperature": run.train.distill_temperature}
    base = checkpoints.read_mark(Path(run.paths.base)) or {}
    return facts | {"base": base.get("digest")}


def write(folder: Path, split: str, found: np.ndarray | Likeliest) -> None:
    arrays = {"": found} if isinstance(found, np.ndarray) else {f"-{name}": one for name, one in vars(found).items()}
    for name, array in arrays.items():
        with open_atomically(folder / f"{split}{name}.npy", durable=True) as file:
            np.save(file, array)


def finish(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / MARK, json.dumps(facts), durable=True)


def read(folder: Path, split: str) -> np.ndarray | Likeliest:
    if (folder / f"{split}.npy").exists():
        return np.load(folder / f"{split}.npy")
    names = ("values", "ids", "starts")
    return Likeliest(*(np.load(folder / f"{split}-{name}.npy", mmap_mode="r") for name in names))


def is_made(run: Run) -> bool:
    path = Path(run.paths.reference) / MARK
    return regular_files.is_there(path) and json_object.read(path) == wanted(run)


def check(run: Run) -> None:
    """Refuse references that are missing, or of other rows or another base than the run's."""
    place = Path(run.paths.reference)
    if not regular_files.is_there(place / MARK):
        raise Fault(f"paths.reference: {place}: no {MARK}; {AGAIN}")
    found, now = json_object.read(place / MARK), wanted(run)
    for key, value in now.items():
        if found.get(key) != value:
            raise Fault(f"paths.reference: {place}: was made for another {key} than this run has; {AGAIN} again")
