"""Preparation of tokenized data: megatron-core's indexed data sets, checked and counted, but not rewritten.

Each split is a range of the documents of each data set, as with Megatron's `--split`. Several data sets form a blend of
Megatron, which draws samples in proportion to the weights. If a source has several files, its weight is divided among
them in proportion to their tokens.
"""

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.model_files import config_json
from conf.schema.data import Data, Part
from conf.schema.run import Run
from contract import indexed_files
from contract.faults import Fault
from trainer.data import indexed
from trainer.data.indexed import Indexed
from trainer.data.read import sources
from trainer.data.read.choose import SPLITS
from trainer.data.tokens import templates
from trainer.data.write import report
from trainer.data.write.progress import Progress
from trainer.startup.console import say

FILE = "blend.json"  # names and weights of the data sets in the folder, and the split in megatron-core's format
SHOWN = 200  # tokens of the report's example
OF_ROWS = {"rows": None, "duplicates": "keep", "near_copies": "keep", "leaks": "keep", "stop": None}


def is_of(parts: Sequence[Part]) -> bool:
    """Whether the sources are indexed data sets. Raise a Fault if only some of them are."""
    indexed_sources = [sources.are_indexed(part) for part in parts]
    if any(indexed_sources) and not all(indexed_sources):
        raise Fault("data.mixture: .bin/.idx are already tokens and cannot be mixed with rows; prepare the rows first")
    return all(indexed_sources)


def prepare(run: Run, parts: Sequence[Part], tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Check the data sets, and write them and their blend to the folder. Return the report."""
    _check_keys(run.data, parts)
    data_sets = [[indexed.open_pair(prefix) for prefix in _prefixes(part)] for part in parts]
    vocabulary = _vocabulary(run, tokenizer)
    progress = Progress(folder.parent / "progress.jsonl", sum(data.bytes for data in itertools.chain(*data_sets)))
    for number, data in enumerate(itertools.chain(*data_sets)):
        say(f"prepare: {data.prefix}: {len(data.lengths):,} documents, {len(data.tokens):,} tokens")
        indexed.check_ids(data, vocabulary, lambda size, number=number: progress.update(number, size, 0, True))
    split = shares(run.data)
    blend = []
    for number, (data, weight) in enumerate(_weighed(parts, data_sets)):
        _check_splits(data, split)
        name = f"{number}-{data.prefix.name}"
        for ending in (indexed_files.BIN, indexed_files.IDX):
            _place(data.prefix.with_name(data.prefix.name + ending), folder / f"{name}{ending}")
        blend.append({"prefix": name, "weight": weight})
    (folder / FILE).write_text(json.dumps({"data_sets": blend, "split": split}, indent=1) + "\n")
    return _report(run, parts, data_sets, tokenizer)


def shares(data: Data) -> str:
    """Return the shares of training, validation and test in the format of core's `split`: plain decimals."""
    return ",".join(f"{share:.10f}" for share in (1 - data.validation - data.test, data.validation, data.test))


def ranges(split: str, count: int) -> list[range]:
    """Return the range of documents of each split, rounded as in megatron-core."""
    values = np.array([float(share) for share in split.split(",")])
    ends = [0.0, *itertools.accumulate((values / values.sum()).tolist())]
    return [range(round(start * count), round(end * count)) for start, end in itertools.pairwise(ends)]


def _check_keys(data: Data, parts: Sequence[Part]) -> None:
    for key, absent in OF_ROWS.items():
        if getattr(data, key) != absent:
            raise Fault(f"data.{key}: is for rows; {parts[0].source} holds tokens, which are used without changes")
    for part in parts:
        if part.shape not in ("auto", "text"):
            raise Fault(f"data.shape: {part.shape}: {part.source} holds tokens of texts; leave it out")


def _prefixes(part: Part) -> list[Path]:
    assert part.source
    return [file.with_suffix("") for file in sources.files(part.source) if file.suffix == indexed_files.BIN]


def _vocabulary(run: Run, tokenizer: Any) -> int:
    """Return the number of ids of the model, which may exceed the tokenizer's."""
    try:
        size = config_json.read(Path(run.paths.model) / config_json.NAME).get("vocab_size")
    except Fault:  # the folder has only a tokenizer
        size = None
    return size if isinstance(size, int) else len(tokenizer)


def _weighed(parts: Sequence[Part], data_sets: Sequence[Sequence[Indexed]]) -> list[tuple[Indexed, float]]:
    weighed = []
    for part, of_part in zip(parts, data_sets, strict=True):
        total = sum(len(data.tokens) for data in of_part)
        weighed += [(data, part.weight * len(data.tokens) / total) for data in of_part]
    return weighed


def _by_split(data: Indexed, split: str) -> dict[str, np.ndarray]:
    """Return the lengths of each split's documents."""
    parts = zip(SPLITS, ranges(split, len(data.lengths)), strict=True)
    return {name: data.lengths[documents.start : documents.stop] for name, documents in parts}


def _check_splits(data: Indexed, split: str) -> None:
    for (name, lengths), share in zip(_by_split(data, split).items(), split.split(","), strict=True):
        if float(share) and not int(lengths.sum(dtype=np.int64)):
            advice = "increase this share, or set it to 0" if name != "training" else "decrease the other shares"
            raise Fault(
                f"data.{name}: gets no tokens of {data.prefix}, which has {len(data.lengths)} documents; {advice}"
            )


def _place(source: Path, target: Path) -> None:
    """Put the file into the folder: as a hard link if both are on one disk, else as a copy."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _report(run: Run, parts: Sequence[Part], data_sets: Sequence[Sequence[Indexed]], tokenizer: Any) -> dict[str, Any]:
    every, split = [*itertools.chain(*data_sets)], shares(run.data)
    by_split = [_by_split(data, split) for data in every]
    lengths = {name: np.concatenate([of_data[name] for of_data in by_split]) for name in SPLITS}
    rows = sum(len(data.lengths) for data in every)
    return {
        "sources": [
            {
                "source": part.source,
                "shape": "tokens",
                "reason": f"{len(of_part)} of Megatron's .bin/.idx",
                "rows": sum(len(data.lengths) for data in of_part),
            }
            for part, of_part in zip(parts, data_sets, strict=True)
        ],
        "rows": {"read": rows, "kept": rows, "not_chosen": 0, **{name: len(some) for name, some in lengths.items()}},
        "dropped": {},
        "tokens": {name: report.lengths(some, some) for name, some in lengths.items()},
        "learned_share": 1.0,
        "template": templates.choose(run.data, tokenizer, "text").record(),
        "example": _example(every[0], tokenizer),
        "warnings": [line for data in every if (line := _without_ends(data, tokenizer.eos_token_id))],
    }


def _example(data: Indexed, tokenizer: Any) -> dict[str, Any]:
    text = tokenizer.decode(data.tokens[:SHOWN].tolist(), skip_special_tokens=False)
    return {"text": text, "learned": [[0, len(text)]]}


def _without_ends(data: Indexed, end: int) -> str:
    """Return a warning if documents lack the end token: they may be from another tokenizer with the same id range."""
    last = indexed.last_ids(data)
    lacking = int((last != end).sum())
    if not lacking:
        return ""
    which = f"{lacking:,} of {len(last):,} documents do not end in the tokenizer's end of text, {end}"
    return f"{data.prefix.name}: {which}: was this tokenizer used?"
