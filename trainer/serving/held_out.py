"""Held-out test: the model's answers to prompts in the training's format, and the likelihood of the references.

exact_match       share of greedy answers that equal the reference or the template's form of it (with an empty
                  thought before it, or as a tool call); spaces around the answer are ignored
log_likelihood    mean log-probability of the reference's tokens, including the end token, as training learns them
perplexity        exp(-log_likelihood): 1 is certainty
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.tokens.perplexity import perplexity
from trainer.data.tokens.templates import Template
from trainer.serving import prompts, unmerged

NAME = "held_out"


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
    likely = [(total, float(len(row.learned_ids))) for total, row in zip(totals, test.rows, strict=True)]
    mean = log_likelihood(likely)
    metrics = {f"{NAME}/exact_match": statistics.fmean(right)}
    if len(right) > 1:
        metrics[f"{NAME}/exact_match_stderr"] = statistics.stdev(map(float, right)) / math.sqrt(len(right))
    metrics |= {f"{NAME}/log_likelihood": mean, f"{NAME}/perplexity": perplexity(-mean)}
    scores: dict[str, Any] = {f"{NAME}/exact_match": [(float(value), 1.0) for value in right]}
    scores |= {f"{NAME}/log_likelihood": likely, f"{NAME}/perplexity": likely}
    samples = [
        {"prompt": row.prompt, "answer": answer, "reference": row.accepted[0], "correct": correct}
        for row, answer, correct in zip(test.rows, answers, right, strict=True)
    ]
    shown = {NAME: samples[: run.evaluate.samples]}
    return {"metrics": metrics, "rows": {NAME: len(right)}, "samples": shown, "scores": scores}


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


def log_likelihood(scores: list[tuple[float, float]]) -> float:
    """Mean log-probability of a token, from each row's sum and its number of tokens."""
    return sum(total for total, _ in scores) / sum(tokens for _, tokens in scores)
