"""Token files of rows for Megatron-Bridge's loop: one sequence per row, or two answers to one prompt.

Rows returns the batches that Bridge's GPTSFTDataset would make of the same rows, padded to data.seq_length. Answers
returns two sequences per row, the chosen one and then the rejected one, with the reference's log-probabilities. Bridge
cuts a step's batch into micro batches at any sequence, so the two of a row are adjacent.
"""

# pyright: reportArgumentType=false

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from torch.utils.data import Dataset

from trainer.data import references


def file(place: Path, split: str) -> str:
    return str(place / f"{split}.idx.parquet")


@dataclass(kw_only=True)
class TokenFiles(DatasetProvider):
    """Dataset of token files that are not packed."""

    folder: str
    seq_length: int
    pad_id: int
    seed: int
    do_validation: bool
    reference: str | None = None  # folder of another model's outputs for the rows, if the objective needs them

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]:
        return self._split("training"), self._split("validation") if self.do_validation else None, None

    def _split(self, split: str) -> "Rows":
        reference = None if self.reference is None else references.read(Path(self.reference), split)
        kind = Rows if reference is None else Answers if isinstance(reference, np.ndarray) else Taught
        return kind(file(Path(self.folder), split), self.seq_length, self.pad_id, reference)


class Rows(Dataset):
    """Rows of a token file. The row group read last is cached. `reference` has another model's outputs for the rows."""

    read: ClassVar[dict[str, type]] = {"input_ids": np.int32, "loss_mask": np.int8}

    def __init__(self, path: str, seq_length: int, pad_id: int, reference: Any = None):
        from pyarrow import parquet

        self.path, self.seq_length, self.pad_id, self.reference = path, seq_length, pad_id, reference
        facts = parquet.read_metadata(path)
        groups = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
        self.starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self.file: Any = None  # opened by the loader process that reads
        self.group, self.columns = -1, ()  # for each column the offsets of rows, and all values

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> Any:
        """Return the ids of a row, and for each id whether the next one is learned."""
        return self.values(row)

    def values(self, row: int) -> tuple[np.ndarray, ...]:
        """Return the values of a row, one list per column."""
        group = int(np.searchsorted(self.starts, row, "right")) - 1
        if group != self.group:
            self._read(group)
        at = row - int(self.starts[group])
        return tuple(values[ends[at] : ends[at + 1]] for ends, values in self.columns)

    def _read(self, group: int) -> None:
        from pyarrow import parquet

        self.file = self.file or parquet.ParquetFile(self.path)
        table = self.file.read_row_group(group, columns=[*self.read], use_threads=False)
        self.columns = tuple(_arrays(table.column(name).combine_chunks(), kind) for name, kind in self.read.items())
        self.group = group

    def collate_fn(self, rows: list[Any]) -> dict[str, Any]:
        shape = (len(rows), self.seq_length)
        tokens, labels = np.full(shape, self.pad_id), np.full(shape, self.pad_id)
        mask = np.zeros(shape, np.int64)
        for i, (ids, learned) in enumerate(rows):
            length = len(ids) - 1
            tokens[i, :length], labels[i, :length], mask[i, :length] = ids[:-1], ids[1:], learned[:-1]
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.arange(self.seq_length).repeat(len(rows), 1),
            "token_count": [len(ids) for ids, _ in rows],
            "attention_mask": None,
        }


class Answers(Rows):
    """Rows with two answers to one prompt."""

    read: ClassVar[dict[str, type]] = Rows.read | {"seq_start_id": np.int32}

    def __getitem__(self, row: int) -> Any:
        """Return a row's two answers in the form of Rows, and the reference's log-probabilities of both."""
        ids, learned, (_, first) = self.values(row)
        reference = np.zeros(2, np.float32) if self.reference is None else self.reference[row]
        return (ids[:first], learned[:first]), (ids[first:], learned[first:]), reference

    def collate_fn(self, rows: list[Any]) -> dict[str, Any]:
        answers = [answer for *both, _ in rows for answer in both]
        references = np.concatenate([reference for *_, reference in rows])
        return super().collate_fn(answers) | {"reference": torch.from_numpy(references)}


class Taught(Rows):
    """Rows with the teacher's most likely tokens at each learned position."""

    def __getitem__(self, row: int) -> Any:
        return *self.values(row), *self.reference.of(row)

    def collate_fn(self, rows: list[Any]) -> dict[str, Any]:
        shape = len(rows), self.seq_length, self.reference.k
        values, tokens = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        for i, (_, learned, *likeliest) in enumerate(rows):
            places = np.flatnonzero(learned[:-1])
            values[i, places], tokens[i, places] = likeliest
        batch = super().collate_fn([row[:2] for row in rows])
        return batch | {"teacher_values": torch.from_numpy(values), "teacher_ids": torch.from_numpy(tokens)}


def _arrays(column: Any, kind: type) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and values of a list array; pyarrow's to_numpy() would import pandas."""
    assert column.offset == 0 and column.values.offset == 0
    return np.frombuffer(column.buffers()[1], np.int32), np.frombuffer(column.values.buffers()[1], kind)
