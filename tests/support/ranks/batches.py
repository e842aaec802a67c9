"""Compare the batches that training gets from token files with those that Megatron-Bridge makes of the rows' text.

Bridge's dataset tokenises paths.data/training.jsonl; its tokens go into token files in paths.output/data, as
trainer.prepare would write them. Prints, as JSON, what was compared. For test_sequences.py.
"""

import hashlib
import json
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from conf.schema.run import Run
from trainer.data.write import packing, sequences_file
from trainer.startup import device


class Tokens:
    def __init__(self, rows: list[dict]):
        self.rows = rows
        self.lengths = np.array([len(row["input_ids"]) for row in rows], np.int32)

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, learned = ([self.rows[row][key] for row in rows] for key in ("input_ids", "loss_mask"))
        return np.concatenate(ids).astype(np.int32), np.concatenate(learned).astype(bool)


def main(run: Run) -> None:
    device.start()
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    from trainer.megatron.sequences import make_dataset

    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=run.paths.model))
    text = bridge_config(run)
    expected = get_dataset_provider(text)([1, 1, 1], text, tokenizer=tokenizer)
    place = Path(run.paths.output) / "data"
    write(run, place, expected, tokenizer.eos_id)
    before = contents(place)
    own = make_dataset(run)
    found = get_dataset_provider(own)([1, 1, 1], own, tokenizer=tokenizer)
    compared = {"keys": [], "batches": 0, "packs": 0}
    for rank in range(2):
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            if ours is None:
                continue
            if run.data.packed:
                compared["packs"] += sum(len(batch["cu_seqlens_q"]) for batch in batches(run, ours, rank))
                continue
            assert len(ours) == len(theirs)
            for one, other in zip(batches(run, ours, rank), batches(run, theirs, rank), strict=True):
                compared["keys"] = sorted(one)
                compared["batches"] += 1
                for key, value in one.items():
                    same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
                    assert same and type(value) is type(other[key]), (key, value, other[key])
                    assert not torch.is_tensor(value) or value.dtype == other[key].dtype, key
    assert contents(place) == before
    print(json.dumps(compared))


def bridge_config(run: Run):
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig

    return GPTSFTDatasetConfig(
        seq_length=run.data.seq_length,
        dataset_root=run.paths.data,
        seed=run.data.seed,
        do_validation=bool(run.train.validate_every),
        do_test=False,
        preprocessing=PromptCompletionSFTPreprocessingConfig(
            prompt_column="input", completion_column="output", separator=" "
        ),
        dataset_kwargs={"pad_to_max_length": True},
    )


def write(run: Run, place: Path, datasets, eos: int) -> None:
    place.mkdir(parents=True)
    counts = {"training": 0, "validation": 0, "test": 0}
    for split, dataset in zip(counts, datasets, strict=True):
        if dataset is None:
            continue
        source = Tokens([dataset[i] for i in range(len(dataset))])
        order, bounds, pad_to = np.arange(len(dataset)), np.arange(len(dataset) + 1), None
        if run.data.packed:
            pad_to = packing.multiple(run)
            order, bounds = packing.assign(packing.padded(source.lengths, pad_to), run.data.seq_length, run.data.seed)
        path = place / f"{split}.idx.parquet"
        sequences_file.write(path, source, order, bounds, pad_to=pad_to, pad_id=eos)
        counts[split] = len(bounds) - 1
    facts = {"kind": "sft", "files": {}, "settings": {}, "sources": [], "tokenizer": "", "vocab_size": 512}
    facts |= {"rows": counts, "sequences": counts, "pad_id": eos}
    (place / "prepared.json").write_text(json.dumps(facts))


def batches(run: Run, dataset, rank: int):
    """Batches of one of two data-parallel ranks, into the second epoch."""
    from megatron.bridge.data.loaders import cyclic_iter
    from megatron.bridge.data.samplers import build_pretraining_data_loader

    batch = run.train.global_batch
    loader = build_pretraining_data_loader(
        dataset, 0, "batch", 1, 0, True, collate_fn=dataset.collate_fn, pin_memory=False, data_parallel_rank=rank,
        data_parallel_size=2, global_batch_size=batch, seed=run.data.seed,
    )  # fmt: skip
    return islice(cyclic_iter(loader), len(dataset) // batch + 2)


def contents(folder: Path) -> dict[str, str]:
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()} | {
        str(f): "" for f in folder.rglob("*") if f.is_dir()
    }
