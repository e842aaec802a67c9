"""Held-out test of a model of texts: how likely the served model finds the tokens of the test split.

Documents stand one behind the other, as in training, and are cut into windows of at most data.seq_length tokens that
are predicted, each from those before it in its window. Every token but the first is predicted once.

    log_likelihood    mean log-probability of a token
    perplexity        exp of its negative; exp of the validation loss is the same of the validation split

The first windows are shown with what the model writes behind their first half.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conf.model_files import config_json
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.data import blend, prepared
from trainer.data.read import indexed
from trainer.data.read.choose import SPLITS
from trainer.data.tokens import tokenizer
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import prompts, unmerged
from trainer.serving.held_out import NAME

PREFIX = "test"  # of the files of prepared texts
Windows = list[list[int]]


def are_prepared(run: Run) -> bool:
    """Whether the data are texts, which have no prompts."""
    return prepared.load(prompts.folder(run)).kind == "text"


def windows(run: Run) -> Windows:
    """Windows of the test split: evaluate.rows of them, of each data set as many as its weight says."""
    place, length = prompts.folder(run), _length(run)
    if not (place / blend.FILE).exists():
        data = indexed.open_pair(place / PREFIX)
        return [*_cut(data.tokens, length, run.evaluate.rows)]
    found = json_object.read(place / blend.FILE)
    counts = _shared(run.evaluate.rows, [one["weight"] for one in found["data_sets"]])
    every: Windows = []
    for one, count in zip(found["data_sets"], counts, strict=True):
        data = indexed.open_pair(place / one["prefix"])
        documents = blend.ranges(found["split"], len(data.lengths))[SPLITS.index(PREFIX)]
        first, last = (int(data.lengths[:at].sum(dtype=np.int64)) for at in (documents.start, documents.stop))
        every += _cut(data.tokens[first:last], length, count)
    return every


def require(run: Run) -> None:
    """Raise a Fault where no token is held out."""
    if not prepared.load(prompts.folder(run)).rows["test"]:
        raise Fault(
            f"{prompts.folder(run)}: no tokens are held out; a larger share of data.test, or evaluate.tasks without "
            f"{NAME}, would do"
        )


def ask(run: Run, served: Any) -> dict[str, Any]:
    """Ask the model. Returns metrics and scores of windows by "task/metric", the number of windows, and samples."""
    asked = windows(run)
    said = served.read(asked)
    found = [value for row in said for value in row]
    mean = math.fsum(found) / len(found)
    metrics = {f"{NAME}/log_likelihood": mean, f"{NAME}/perplexity": perplexity(-mean)}
    scores = {name: [(math.fsum(row), len(row)) for row in said] for name in metrics}
    samples = {NAME: _samples(run, served, asked)}
    return {"metrics": metrics, "rows": {NAME: len(asked)}, "samples": samples, "scores": scores}


def _length(run: Run) -> int:
    """Tokens of a window. vLLM writes one token behind each, for which the model's positions need room."""
    config = config_json.read(unmerged.model(run) / config_json.NAME)
    most = config.get("max_position_embeddings") or config.get("n_positions") or run.data.seq_length + 2
    return min(run.data.seq_length + 1, most - 1)


def _cut(tokens: np.ndarray, length: int, count: int | None) -> Iterator[list[int]]:
    starts = range(0, len(tokens) - 1, length - 1)
    for start in starts[:count]:
        yield tokens[start : start + length].tolist()


def _shared(count: int | None, weights: list[float]) -> list[int | None]:
    """Whole numbers in the proportion of the weights, whose sum is the count."""
    if count is None:
        return [None] * len(weights)
    ends = np.rint(np.cumsum(weights) / sum(weights) * count).astype(int)
    return np.diff(ends, prepend=0).tolist()


def _samples(run: Run, served: Any, asked: Windows) -> list[dict[str, Any]]:
    shown = [window for window in asked[: run.evaluate.samples] if len(window) > 1]
    halves = [window[: len(window) // 2 or 1] for window in shown]
    words = tokenizer.load(Path(unmerged.model(run)), run.model.trust_remote_code)
    most = min(run.evaluate.max_tokens, _length(run) // 2)
    found = []
    for window, half, (written, _) in zip(shown, halves, served.go_on(halves, most), strict=True):
        prompt, answer, reference = map(words.decode, (half, written, window[len(half) :][:most]))
        found.append({"prompt": prompt, "answer": answer, "reference": reference, "correct": None})
    return found
