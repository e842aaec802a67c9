"""The held-out test: what the model answers to prompts as training writes them, and how likely it finds the references.

Two lm-eval tasks over the same rows of test.jsonl, reported as one:

    exact_match       share of greedy answers that equal the reference, spaces around it aside
    log_likelihood    mean log-probability of the reference's tokens, end of text included
    perplexity        exp of its negative: 1 is certainty
"""

import math
from pathlib import Path

from conf.schema import Run
from trainer import pairs

NAME = "held_out"
LIKELIHOOD = "held_out_likelihood"
METRICS = ("exact_match", "log_likelihood", "perplexity")


def file(run: Run) -> Path:
    return Path(run.paths.data) / "test.jsonl"


def tasks(run: Run, tokenizer) -> list[dict]:
    """For lm_eval's TaskManager.load()."""
    from datasets import Dataset

    rows = [_row(run, row, tokenizer) for row in pairs.read(file(run), run.evaluate.rows)]
    shared = {
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": lambda row: row["prompt"],
        "target_delimiter": "",
        "num_fewshot": 0,
    }
    answers = {
        "task": NAME,
        "output_type": "generate_until",
        "doc_to_target": lambda row: row["reference"],
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": run.evaluate.max_tokens},
        "process_results": lambda row, answers: {"exact_match": is_right(answers[0], row["reference"])},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    likelihoods = {
        "task": LIKELIHOOD,
        "output_type": "loglikelihood",
        "doc_to_target": lambda row: row["learned"],
        "process_results": lambda row, found: dict.fromkeys(METRICS[1:], (found[0][0], row["tokens"])),
        "metric_list": [
            {"metric": "log_likelihood", "aggregation": _mean, "higher_is_better": True},
            {"metric": "perplexity", "aggregation": lambda pairs: math.exp(-_mean(pairs)), "higher_is_better": False},
        ],
    }
    return [shared | answers, shared | likelihoods]


def is_right(answer: str, reference: str) -> bool:
    return answer.strip() == reference.strip()


def _row(run: Run, row: dict, tokenizer) -> dict:
    learned = pairs.answer(run.data.template, row, tokenizer) + tokenizer.eos_token
    return {
        "prompt": pairs.prompt(run.data.template, row),
        "reference": row["output"],
        "learned": learned,
        "tokens": len(pairs.encode(tokenizer, learned)),
    }


def _mean(found: list[tuple[float, int]]) -> float:
    return sum(total for total, _ in found) / sum(tokens for _, tokens in found)
