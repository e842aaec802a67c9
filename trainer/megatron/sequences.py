"""Readers of prepared data (trainer/data/prepared.py) for Megatron-Bridge's loop: token files, never text.

Packed sequences are read by Bridge's own dataset. It has none for sequences of one row that are tokens already: Rows
gives the batches that its GPTSFTDataset would make of the same rows, padded to data.seq_length. Texts, for pretraining,
are read by megatron-core's GPTDataset, whose indexes go to paths.output/cache. Nothing is written beside the data. Data
sets that were .bin/.idx already hold every split, and are blended by core (trainer/data/blend.py).

The order is Bridge's: every epoch is a permutation drawn with data.seed.
"""

# pyright: reportArgumentType=false

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.training.config import GPTDatasetConfig
from torch.utils.data import Dataset

from conf.schema.run import Run
from contract import json_object
from trainer.data import blend, prepared
from trainer.data.write import packing


def make_dataset(run: Run):
    """Dataset settings for ConfigContainer.dataset."""
    place = prepared.folder(run)
    found = prepared.load(place)
    shared = {"seq_length": run.data.seq_length, "num_workers": run.data.workers}
    if found.kind == "text":
        return _blend(run, place, shared) if blend.FILE in found.files else _texts(run, place, shared)
    shared |= {"seed": run.data.seed, "dataloader_type": "batch", "do_validation": bool(run.train.validate_every)}
    if run.data.packed:
        return _packs(run, place, shared)
    return TokenFiles(folder=str(place), pad_id=found.pad_id, **shared)


def file(place: Path, split: str) -> str:
    return str(place / f"{split}.idx.parquet")


def _packs(run: Run, place: Path, shared: dict[str, Any]) -> GPTSFTDatasetConfig:
    validation = shared["do_validation"]
    return GPTSFTDatasetConfig(
        dataset_root=place,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=run.data.seq_length,
            packed_train_data_path=file(place, "training"),
            packed_val_data_path=file(place, "validation") if validation else None,
            packed_metadata_path=place / "none.jsonl",  # never read nor written; without it a folder is made for it
            pad_seq_to_mult=packing.multiple(run),
        ),
        dataset_kwargs={"pad_to_max_length": True},
        do_test=False,
        **shared,
    )


def _texts(run: Run, place: Path, shared: dict[str, Any]) -> GPTDatasetConfig:
    validation = ([str(place / "validation")], None) if run.train.validate_every else None
    blends = [([str(place / "training")], None), validation, None]
    return GPTDatasetConfig(blend_per_split=blends, **_of_documents(run), **shared)


def _blend(run: Run, place: Path, shared: dict[str, Any]) -> "Blend":
    found = json_object.read(place / blend.FILE)
    prefixes = [str(place / one["prefix"]) for one in found["data_sets"]]
    weights = [one["weight"] for one in found["data_sets"]] if len(prefixes) > 1 else None
    made = Blend(blend=(prefixes, weights), split=found["split"], **_of_documents(run), **shared)
    made.read = 2 if run.train.validate_every else 1
    return made


def _of_documents(run: Run) -> dict[str, Any]:
    return {
        "random_seed": run.data.seed,
        "path_to_cache": str(Path(run.paths.output) / "cache"),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "dataloader_type": "single",
    }


class Blend(GPTDatasetConfig):
    """Data sets each of which holds every split as a range of its documents. Those behind the first `read` are left."""

    read = 2

    def finalize(self) -> None:
        super().finalize()
        splits: Any = self.split_matrix  # core's own annotation leaves out that one may be None
        self.split_matrix = [*splits[: self.read], *[None] * (3 - self.read)]  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(kw_only=True)
class TokenFiles(DatasetProvider):
    """Dataset of token files with one row a sequence."""

    folder: str
    seq_length: int
    pad_id: int
    seed: int
    do_validation: bool

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]:
        splits = ("training", *(["validation"] if self.do_validation else []))
        built = [Rows(file(Path(self.folder), split), self.seq_length, self.pad_id) for split in splits]
        return built[0], built[1] if self.do_validation else None, None


class Rows(Dataset):
    """Rows of a token file. The row group read last is kept."""

    def __init__(self, path: str, seq_length: int, pad_id: int):
        from pyarrow import parquet

        self.path, self.seq_length, self.pad_id = path, seq_length, pad_id
        facts = parquet.read_metadata(path)
        groups = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
        self.starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self.file: Any = None  # opened by the loader process that reads
        self.group, self.columns = -1, ()  # for each column where rows end, and the values of all

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a row, and for each whether the one after it is learned."""
        group = int(np.searchsorted(self.starts, row, "right")) - 1
        if group != self.group:
            self._read(group)
        at = row - int(self.starts[group])
        ids, learned = (values[ends[at] : ends[at + 1]] for ends, values in self.columns)
        return ids, learned

    def _read(self, group: int) -> None:
        from pyarrow import parquet

        self.file = self.file or parquet.ParquetFile(self.path)
        table = self.file.read_row_group(group, columns=["input_ids", "loss_mask"], use_threads=False)
        types = ((table.column("input_ids"), np.int32), (table.column("loss_mask"), np.int8))
        self.columns = tuple(_arrays(column.combine_chunks(), kind) for column, kind in types)
        self.group = group

    def collate_fn(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
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


def _arrays(column: Any, kind: type) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and values of a list array; its own to_numpy() would import pandas."""
    assert column.offset == 0 and column.values.offset == 0
    return np.frombuffer(column.buffers()[1], np.int32), np.frombuffer(column.values.buffers()[1], kind)
