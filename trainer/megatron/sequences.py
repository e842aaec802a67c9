"""Readers of prepared data (trainer/data/prepared.py) for Megatron-Bridge's loop: token files, never text.

Packed sequences are read by Bridge's own dataset. It has none for sequences of one row that are tokens already, nor for
two answers to one prompt: trainer/megatron/token_files.py reads those. Texts, for pretraining, are read by
megatron-core's GPTDataset, whose indexes go to paths.output/cache. Nothing is written beside the data. Data sets that
were .bin/.idx already hold every split, and are blended by core (trainer/data/blend.py).

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
    """Dataset settings for ConfigContainer.dataset."""
    place = prepared.folder(run)
    found = prepared.load(place)
    shared = {"seq_length": run.data.seq_length, "num_workers": run.data.workers}
    if found.kind == "text":
        return _blend(run, place, shared) if blend.FILE in found.files else _texts(run, place, shared)
    shared |= {"seed": run.data.seed, "dataloader_type": "batch", "do_validation": bool(run.train.validate_every)}
    if run.data.packed:
        return _packs(run, place, shared)
    reference = run.paths.reference if objectives.has_reference(run) else None
    return TokenFiles(folder=str(place), pad_id=found.pad_id, reference=reference, **shared)


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
