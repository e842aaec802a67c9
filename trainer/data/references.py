"""Scores of prepared rows by another model: files of trainer.reference, which training reads.

    <split>.npy                        dpo: float32 [rows, 2], log-probability of the chosen answer and of the rejected
    <split>-values.npy, -ids.npy       distill: float32 and int32 [learned tokens, top k], log-probabilities and tokens
    <split>-starts.npy                 int64 [rows + 1], where the tokens of each row begin
    references.json                    written last: the rows, and the base (dpo), or the teacher and its settings

Training refuses references of other rows or of another base.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from conf.rules import objectives
from conf.schema.run import Run
from contract import checkpoints, checksums, json_object, regular_files
from contract.faults import Fault
from contract.files import open_atomically, write_atomically
from contract.output_marks import REFERENCE
from trainer.data import prepared
from trainer.data.preparation import MANIFEST

MARK = REFERENCE.mark
ARRAYS = ("values", "ids")  # files of arrays; dpo has only values
AGAIN = "python -m trainer.reference writes it"


@dataclass(frozen=True)
class Likeliest:
    """A teacher's most likely tokens, for all rows of a split."""

    values: np.ndarray
    ids: np.ndarray
    starts: np.ndarray

    @property
    def k(self) -> int:
        return self.values.shape[1]

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities and tokens at the learned positions of a row."""
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return self.values[part], self.ids[part]


def required_facts(run: Run) -> dict[str, Any]:
    """Return the facts of the references that a run needs. Training does not have the teacher's base."""
    facts = {"objective": run.train.objective, "rows": checksums.of_file(prepared.folder(run) / MANIFEST)}
    facts["precision"] = run.train.precision
    if objectives.has_teacher(run):
        return facts | {"top_k": run.train.teacher_top_k, "temperature": run.train.distill_temperature}
    base = checkpoints.read_mark(Path(run.paths.base)) or {}
    return facts | {"base": base.get("digest")} | _adapter(run)


def _adapter(run: Run) -> dict[str, str]:
    """Return the digest of the adapter from which training starts; empty without an adapter or without its file."""
    if not objectives.has_starting_adapter(run):
        return {}
    weights = Path(str(run.model.adapter)).expanduser() / "adapter_model.safetensors"
    return {"adapter": checksums.of_file(weights)} if weights.exists() else {}


def recorded_facts(run: Run) -> dict[str, Any]:
    """Return the required facts and, for a teacher, the digest of its base, which only trainer.reference knows."""
    if not objectives.has_teacher(run):
        return required_facts(run)
    return required_facts(run) | {"teacher": (checkpoints.read_mark(Path(run.paths.teacher_base)) or {}).get("digest")}


def begin(folder: Path) -> None:
    """Remove the mark of earlier references, because their files will be overwritten."""
    (folder / MARK).unlink(missing_ok=True)


@contextlib.contextmanager
def written(folder: Path, split: str, starts: np.ndarray) -> Iterator[Callable[..., None]]:
    """Yield put(place, values[, ids]), which writes arrays from this place on. Files appear only when they are
    complete.

    `starts` has the beginning of each row's places. Without ids, the only file is dpo's.
    """
    with contextlib.ExitStack() as stack:
        files: list[tuple[BinaryIO, int]] = []

        def put(place: int, *arrays: np.ndarray) -> None:
            if not files:
                names = [f"{split}-{name}.npy" for name in ARRAYS] if len(arrays) > 1 else [f"{split}.npy"]
                for name, array in zip(names, arrays, strict=True):
                    file = stack.enter_context(open_atomically(folder / name, durable=True))
                    header = np.lib.format.header_data_from_array_1_0(array)
                    header |= {"fortran_order": False, "shape": (int(starts[-1]), *array.shape[1:])}
                    np.lib.format.write_array_header_1_0(file, header)
                    files.append((file, file.tell()))
            for (file, data_start), array in zip(files, arrays, strict=True):
                file.seek(data_start + place * array.nbytes // max(len(array), 1))
                file.write(np.ascontiguousarray(array).data)

        yield put
        if len(files) > 1:
            with open_atomically(folder / f"{split}-starts.npy", durable=True) as file:
                np.save(file, starts)


def finish(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / MARK, json.dumps(facts), durable=True)


def read(folder: Path, split: str) -> np.ndarray | Likeliest:
    if (folder / f"{split}.npy").exists():
        return np.load(folder / f"{split}.npy")
    names = ("values", "ids", "starts")
    return Likeliest(*(np.load(folder / f"{split}-{name}.npy", mmap_mode="r") for name in names))


def is_made(run: Run) -> bool:
    path = Path(run.paths.reference) / MARK
    return regular_files.is_there(path) and json_object.read(path) == recorded_facts(run)


def check(run: Run) -> None:
    """Raise a Fault if references are missing, or of other rows or of another base than the run's."""
    place = Path(run.paths.reference)
    if not regular_files.is_there(place / MARK):
        raise Fault(f"paths.reference: {place}: no {MARK}; {AGAIN}")
    recorded, required = json_object.read(place / MARK), required_facts(run)
    for key, value in required.items():
        if recorded.get(key) != value:
            raise Fault(f"paths.reference: {place}: was written for another {key} than this run's; {AGAIN} again")
