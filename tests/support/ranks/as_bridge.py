"""Answers of functions that need Megatron-Bridge or megatron-core. See conftest.as_bridge.

main(run) calls the function that request.json in run.paths.output names, there, and leaves its result in answer.json.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema.run import Run


def main(run: Run) -> None:
    os.chdir(run.paths.output)
    request = json.loads(Path("request.json").read_text())
    answer = globals()[request.pop("function")](**request)
    Path("answer.json").write_text(json.dumps(answer))


def packs(lengths: str, capacity: int) -> int:
    """Number of packs of first_fit_shuffle."""
    from megatron.bridge.data.packing.algorithms import first_fit_shuffle

    np.random.seed(1)
    return len(first_fit_shuffle(np.load(lengths).tolist(), capacity))


def packed_file(rows: list[dict], assignments: list[list[int]], pad_to: int, pad_id: int, capacity: int) -> None:
    """Write Bridge's packed Parquet for these packs, given by the lengths of their rows, each of one row alone."""
    from megatron.bridge.data.packing.algorithms import create_hist, fill_packing_strategy
    from megatron.bridge.data.packing.offline import _pre_pad_data_point
    from megatron.bridge.data.packing.parquet import write_packed_parquet

    for row in rows:
        runtime = -(-(len(row["input_ids"]) - 1) // pad_to) * pad_to
        _pre_pad_data_point(row, capacity, runtime + 1, pad_id)
    sequences, _ = create_hist(rows, capacity)
    write_packed_parquet(fill_packing_strategy(assignments, sequences, capacity, pad_id), "bridge.parquet")


def read_packed(path: str, pad_to: int, eos: int) -> list[dict]:
    """Sequences as its dataset reads them."""
    from types import SimpleNamespace

    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

    tokenizer = SimpleNamespace(eos_id=eos)
    options = {"max_seq_length": 64, "pad_to_max_length": True, "prompt_template": "{input} {output}"}
    data = GPTSFTPackedParquetDataset(
        path, tokenizer, pad_seq_to_mult=pad_to, label_key="output", truncation_field="input", **options
    )
    for i in range(len(data)):
        row = data[i]
        data.validate_row(i, row["input_ids"], row["loss_mask"], row["seq_boundaries"][:-1])
    return [data[i] for i in range(len(data))]


def adopted(source: str, out: str) -> str:
    """Write a checkpoint of Megatron's as a model. Return why it is refused, if it is."""
    from contract.faults import Fault
    from trainer.weights.adopted import checkpoints, files

    try:
        files.write(Path(source), checkpoints.read(Path(source))[1], Path(out))
    except Fault as refused:
        return str(refused)
    return ""


def index(jsonl: str) -> list[dict]:
    """Build its index, where there is none, and read every row by it."""
    from megatron.bridge.data.datasets.utils import _JSONLMemMapDataset

    data = _JSONLMemMapDataset([jsonl], workers=1)
    return [data[i] for i in range(len(data))]


def indexed(prefix: str, documents: list[list[int]], vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def blends(documents: dict[str, list[list[int]]], cases: list[dict]) -> list[list]:
    """Samples of training and validation: as core blends files of its builder, and as a run reads what it prepared."""
    from conf.load import load
    from trainer.data import preparation

    for prefix, some in documents.items():
        indexed(prefix, some, vocab_size=512)
    found = []
    for case in cases:
        run = load("tiny", case["overrides"])
        preparation.prepare(run, run.data.parts, [None] * len(run.data.parts), Path(run.paths.data))
        found.append(_blended(run, case["blend"], case["split"], case["sizes"]))
    return found


def _blended(run: Run, blend: list, split: str, sizes: list[int]) -> list[list]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from trainer.megatron.sequences import make_dataset

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 0, 512, {}

    own: Any = make_dataset(run)
    own.tokenizer = Tokenizer()
    own.finalize()
    core = GPTDatasetConfig(
        random_seed=run.data.seed,
        sequence_length=run.data.seq_length,
        blend=tuple(blend),
        split=split,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    found = []
    for config in (core, own):
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        assert config is core or built[2] is None
        pairs: Any = zip(built[:2], sizes[:2], strict=True)
        found.append([[data[i]["tokens"].tolist() for i in range(count)] for data, count in pairs])
    return found


def gpt_samples(prefix: str, length: int, count: int) -> list[list[int]]:
    """Samples of a GPTDataset on it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 0, 512, {}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        blend_per_split=[([prefix], None), None, None],
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache="cache",
    )
    data, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [count, 0, 0], lambda: True, config).build()
    assert data is not None
    return [data[i]["tokens"].tolist() for i in range(count)]
