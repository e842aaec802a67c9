"""Datasets of prepared data (trainer/data/prepared.py) for Megatron-Bridge's loop: token files, never text.

Bridge's own dataset reads packed sequences. It cannot read tokenized rows that are not packed, nor two answers to one
prompt: trainer/megatron/token_files.py reads those. megatron-core's GPTDataset reads texts for pretraining; its indexes
go to paths.output/cache. Nothing is written next to the data. Data sets given as .bin/.idx contain every split, and
core blends them (trainer/data/blend.py).

The order is Bridge's: every epoch is a permutation drawn with data.seed.
"""

# pyright: reportArgumentType=false

from pathlib import Path
from typing import Any

from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.training.config import GPTDatasetConfig

from conf.rules import objectives
from conf.schema.run import Run
from contract import json_object
from trainer.data import blend, prepared
from trainer.data.write import packing
from trainer.megatron.token_files import TokenFiles, file


def make_dataset(run: Run):
    """Return the dataset settings for ConfigContainer.dataset."""
    place = prepared.folder(run)
    description = prepared.load(place)
    shared = {"seq_length": run.data.seq_length, "num_workers": run.data.workers}
    if description.kind == "text":
        return _blend(run, place, shared) if blend.FILE in description.files else _texts(run, place, shared)
    shared |= {"seed": run.data.seed, "dataloader_type": "batch", "do_validation": bool(run.train.validate_every)}
    if not run.data.packed:
        reference = run.paths.reference if objectives.has_reference(run) else None
        return TokenFiles(folder=str(place), pad_id=description.pad_id, reference=reference, **shared)
    return GPTSFTDatasetConfig(
        dataset_root=place,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=run.data.seq_length,
            packed_train_data_path=file(place, "training"),
            packed_val_data_path=file(place, "validation") if shared["do_validation"] else None,
            packed_metadata_path=place / "none.jsonl",  # never read or written; without a path Bridge creates a folder
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
    record = json_object.read(place / blend.FILE)
    prefixes = [str(place / data_set["prefix"]) for data_set in record["data_sets"]]
    weights = [data_set["weight"] for data_set in record["data_sets"]] if len(prefixes) > 1 else None
    dataset = Blend(blend=(prefixes, weights), split=record["split"], **_of_documents(run), **shared)
    dataset.read = 2 if run.train.validate_every else 1
    return dataset


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
    """Data sets that each contain every split as a range of documents. Only the first `read` splits are read."""

    read = 2

    def finalize(self) -> None:
        super().finalize()
        splits: Any = self.split_matrix  # core's annotation does not allow None for a split
        self.split_matrix = [*splits[: self.read], *[None] * (3 - self.read)]  # pyright: ignore[reportAttributeAccessIssue]
