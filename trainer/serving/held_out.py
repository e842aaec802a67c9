"""Held-out test of a model: its answers to prompts in the training's format, or the likelihood of texts.

If the data have prompts, the test reads the rows of test.jsonl:

    exact_match       share of greedy answers that equal the reference or the template's form of it (with an empty
                      thought before it, or as a tool call); spaces around the answer are ignored
    log_likelihood    mean log-probability of the reference's tokens, including the end token, as training learns them
    perplexity        exp(-log_likelihood): 1 is certainty

Texts have no prompts: log_likelihood is the mean log-probability of a token of the test split, and perplexity is
comparable with exp of the validation loss. As in training, documents are joined and cut into windows in which at most
data.seq_length tokens are predicted, each from the tokens before it in the window. Every token except the first is
predicted once. The samples show the first windows and the model's continuation of their first half.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.data import blend, indexed, prepared
from trainer.data.read.choose import SPLITS
from trainer.data.tokens import tokenizer
from trainer.data.tokens.perplexity import perplexity
from trainer.data.tokens.templates import Template
from trainer.serving import prompts, start_up, unmerged

NAME = "held_out"
TEXTS = "test"  # prefix of the files of prepared texts

Windows = list[list[int]]
Sums = list[tuple[float, float]]  # for each row the sum of its tokens' log-probabilities, and their number


@dataclass(frozen=True)
class Row:
    """A row of test.jsonl."""

    prompt: str
    learned: str  # the answer in the training's format
    accepted: tuple[str, ...]  # correct answers; the first is the reference
    prompt_ids: list[int]
    learned_ids: list[int]


@dataclass(frozen=True)
class Test:
    rows: list[Row]
    until: list[str]  # texts that end an answer


def read(run: Run) -> Test:
    template = prompts.template(run, str(unmerged.model(run)))
    raw = prompts.read(file(run), run.evaluate.rows)
    rows = [_row(template, row, f"{file(run)}:{number}") for number, row in enumerate(raw, 1)]
    return Test(rows, template.ends_by_text)


def file(run: Run) -> Path:
    return prompts.folder(run) / "test.jsonl"


def ask(run: Run, served: Any, test: Test) -> dict[str, Any]:
    """Evaluate the model. Returns metrics and row scores by "task/metric", the number of rows, and samples."""
    settings = {"until": test.until, "do_sample": False, "max_gen_toks": run.evaluate.max_tokens}
    served.tokens = {row.prompt: row.prompt_ids for row in reversed(test.rows)}
    answers = served.generate_until([SimpleNamespace(args=(row.prompt, settings)) for row in test.rows])
    served.tokens = None
    learned = [((row.prompt, row.learned), row.prompt_ids, row.learned_ids) for row in test.rows]
    totals = [total for total, _ in served._loglikelihood_tokens(learned)]
    right = [is_right(answer, row.accepted) for answer, row in zip(answers, test.rows, strict=True)]
    metrics, scores = _likelihood([(total, len(row.learned_ids)) for total, row in zip(totals, test.rows, strict=True)])
    exact = {f"{NAME}/exact_match": statistics.fmean(right)}
    if len(right) > 1:
        exact[f"{NAME}/exact_match_stderr"] = statistics.stdev(map(float, right)) / math.sqrt(len(right))
    scores[f"{NAME}/exact_match"] = [(float(value), 1.0) for value in right]
    samples = [
        {"prompt": row.prompt, "answer": answer, "reference": row.accepted[0], "correct": correct}
        for row, answer, correct in zip(test.rows, answers, right, strict=True)
    ]
    shown = {NAME: samples[: run.evaluate.samples]}
    return {"metrics": exact | metrics, "rows": {NAME: len(right)}, "samples": shown, "scores": scores}


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    return answer.strip() in {text.strip() for text in accepted}


def _row(template: Template, row: dict, place: str) -> Row:
    learned = template.answer(row)
    whole = template.without_end(learned)
    try:
        prompt_ids, learned_ids = template.tokens(row)
    except Fault as fault:
        raise Fault(f"{place}: {fault}; python -m trainer.prepare writes it again") from None
    return Row(template.prompt(row), learned, (template.reference(row) or whole, whole), prompt_ids, learned_ids)


def _likelihood(sums: Sums) -> tuple[dict[str, float], dict[str, Sums]]:
    """Metrics over all tokens of all rows, and the scores of each row by metric."""
    mean = math.fsum(total for total, _ in sums) / sum(tokens for _, tokens in sums)
    metrics = {f"{NAME}/log_likelihood": mean, f"{NAME}/perplexity": perplexity(-mean)}
    return metrics, dict.fromkeys(metrics, sums)


def has_texts(run: Run) -> bool:
    """Whether the data are texts, which have no prompts."""
    return prepared.load(prompts.folder(run)).kind == "text"


def windows(run: Run) -> Windows:
    """Windows of the test split: evaluate.rows of them, divided among the data sets by weight."""
    place, length = prompts.folder(run), _length(run)
    if not (place / blend.FILE).exists():
        data = indexed.open_pair(place / TEXTS)
        return [*_cut(data.tokens, length, run.evaluate.rows)]
    blended = json_object.read(place / blend.FILE)
    counts = _shared(run.evaluate.rows, [data_set["weight"] for data_set in blended["data_sets"]])
    cut: Windows = []
    for data_set, count in zip(blended["data_sets"], counts, strict=True):
        data = indexed.open_pair(place / data_set["prefix"])
        documents = blend.ranges(blended["split"], len(data.lengths))[SPLITS.index(TEXTS)]
        first, last = (int(data.lengths[:at].sum(dtype=np.int64)) for at in (documents.start, documents.stop))
        cut += _cut(data.tokens[first:last], length, count)
    return cut


def require_texts(run: Run) -> None:
    """Raise a Fault if no token is held out."""
    if not prepared.load(prompts.folder(run)).rows["test"]:
        raise Fault(
            f"{prompts.folder(run)}: no tokens are held out; set a larger data.test, or evaluate.tasks without {NAME}"
        )


def ask_texts(run: Run, served: Any) -> dict[str, Any]:
    """Evaluate the model. Returns metrics and window scores by "task/metric", the number of windows, and samples."""
    cut = windows(run)
    metrics, scores = _likelihood([(math.fsum(row), len(row)) for row in served.read(cut)])
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
