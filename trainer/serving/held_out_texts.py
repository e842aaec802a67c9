"""Held-out test of a model trained on texts: the served model's log-probabilities of the test split's tokens.

As in training, documents are joined and cut into windows in which at most data.seq_length tokens are predicted, each
from the tokens before it in the window. Every token except the first is predicted once.

    log_likelihood    mean log-probability of a token
    perplexity        exp(-log_likelihood), comparable with exp of the validation loss

The samples show the first windows and the model's continuation of their first half.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.data import blend, indexed, prepared
from trainer.data.read.choose import SPLITS
from trainer.data.tokens import tokenizer
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import prompts, start_up, unmerged
from trainer.serving.held_out import NAME

PREFIX = "test"  # of the files of prepared texts
Windows = list[list[int]]


def are_prepared(run: Run) -> bool:
    """Whether the data are texts, which have no prompts."""
    return prepared.load(prompts.folder(run)).kind == "text"


def windows(run: Run) -> Windows:
    """Windows of the test split: evaluate.rows of them, divided among the data sets by weight."""
    place, length = prompts.folder(run), _length(run)
    if not (place / blend.FILE).exists():
        data = indexed.open_pair(place / PREFIX)
        return [*_cut(data.tokens, length, run.evaluate.rows)]
    blended = json_object.read(place / blend.FILE)
    counts = _shared(run.evaluate.rows, [data_set["weight"] for data_set in blended["data_sets"]])
    cut: Windows = []
    for data_set, count in zip(blended["data_sets"], counts, strict=True):
        data = indexed.open_pair(place / data_set["prefix"])
        documents = blend.ranges(blended["split"], len(data.lengths))[SPLITS.index(PREFIX)]
        first, last = (int(data.lengths[:at].sum(dtype=np.int64)) for at in (documents.start, documents.stop))
        cut += _cut(data.tokens[first:last], length, count)
    return cut


def require(run: Run) -> None:
    """Raise a Fault if no token is held out."""
    if not prepared.load(prompts.folder(run)).rows["test"]:
        raise Fault(
            f"{prompts.folder(run)}: no tokens are held out; set a larger data.test, or evaluate.tasks without {NAME}"
        )


def ask(run: Run, served: Any) -> dict[str, Any]:
    """Evaluate the model. Returns metrics and window scores by "task/metric", the number of windows, and samples."""
    cut = windows(run)
    log_probs = served.read(cut)
    of_tokens = [value for row in log_probs for value in row]
    mean = math.fsum(of_tokens) / len(of_tokens)
    metrics = {f"{NAME}/log_likelihood": mean, f"{NAME}/perplexity": perplexity(-mean)}
    scores = {name: [(math.fsum(row), len(row)) for row in log_probs] for name in metrics}
    samples = {NAME: _samples(run, served, cut)}
    return {"metrics": metrics, "rows": {NAME: len(cut)}, "samples": samples, "scores": scores}


def _length(run: Run) -> int:
    """Tokens of a window. vLLM writes one token after each window, which needs a position of the model too."""
    most = start_up.positions(run) or run.data.seq_length + 2
    return min(run.data.seq_length + 1, most - 1)


def _cut(tokens: np.ndarray, length: int, count: int | None) -> Iterator[list[int]]:
    starts = range(0, len(tokens) - 1, length - 1)
    for start in starts[:count]:
        yield tokens[start : start + length].tolist()


def _shared(count: int | None, weights: list[float]) -> list[int | None]:
    """Integers in proportion to the weights, with the count as their sum."""
    if count is None:
        return [None] * len(weights)
    ends = np.rint(np.cumsum(weights) / sum(weights) * count).astype(int)
    return np.diff(ends, prepend=0).tolist()


def _samples(run: Run, served: Any, cut: Windows) -> list[dict[str, Any]]:
    shown = [window for window in cut[: run.evaluate.samples] if len(window) > 1]
    halves = [window[: len(window) // 2 or 1] for window in shown]
    words = tokenizer.load(Path(unmerged.model(run)), run.model.trust_remote_code)
    most = min(run.evaluate.max_tokens, _length(run) // 2)
    samples = []
    for window, half, (written, _) in zip(shown, halves, served.continue_prompts(halves, most), strict=True):
        prompt, answer, reference = map(words.decode, (half, written, window[len(half) :][:most]))
        samples.append({"prompt": prompt, "answer": answer, "reference": reference, "correct": None})
    return samples
