"""Log-probabilities that a reference gives to prepared rows: files of trainer.reference, which training reads.

    <split>.npy          float32 [rows, 2]: log-probability of the chosen answer and of the rejected one, a row each
    references.json      written last: of which rows, and by which base

A training whose rows or base are others refuses them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema.run import Run
from contract import checkpoints, json_object, regular_files
from contract.faults import Fault
from contract.files import open_atomically, write_atomically
from trainer.data import prepared
from trainer.data.identity import MANIFEST, digest

MARK = "references.json"
AGAIN = "python -m trainer.reference makes it"


def wanted(run: Run) -> dict[str, Any]:
    """The facts of the references that a run needs."""
    base = checkpoints.read_mark(Path(run.paths.base)) or {}
    rows = digest(prepared.folder(run) / MANIFEST)
    return {
        "objective": run.train.objective,
        "rows": rows,
        "base": base.get("digest"),
        "precision": run.train.precision,
    }


def write(folder: Path, split: str, found: np.ndarray) -> None:
    with open_atomically(folder / f"{split}.npy", durable=True) as file:
        np.save(file, found.astype(np.float32))


def finish(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / MARK, json.dumps(facts), durable=True)


def read(folder: Path, split: str) -> np.ndarray:
    return np.load(folder / f"{split}.npy")


def is_made(run: Run) -> bool:
    path = Path(run.paths.reference) / MARK
    return regular_files.is_there(path) and json_object.read(path) == wanted(run)


def check(run: Run) -> None:
    """Refuse references that are missing, or of other rows or another base than the run's."""
    place = Path(run.paths.reference)
    if not regular_files.is_there(place / MARK):
        raise Fault(f"paths.reference: {place}: no {MARK}; {AGAIN}")
    found, now = json_object.read(place / MARK), wanted(run)
    for key, named in (("objective", "objective"), ("rows", "rows"), ("base", "base"), ("precision", "precision")):
        if found.get(key) != now[key]:
            raise Fault(f"paths.reference: {place}: was made for another {named} than this run has; {AGAIN} again")
