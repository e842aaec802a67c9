"""Held-out test: the model's answers to prompts in the training's format, and the likelihood of the references.

Two lm-eval tasks over the same rows of test.jsonl, reported as one:

    exact_match       share of greedy answers that equal the reference or the template's form of it (with an empty
                      thought before it, or as a tool call); spaces around the answer are ignored
    log_likelihood    mean log-probability of the reference's tokens, including the end token, as training learns them
    perplexity        exp(-log_likelihood): 1 is certainty
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.tokens.perplexity import perplexity
from trainer.data.tokens.templates import Template
from trainer.serving import prompts, unmerged

NAME = "held_out"
LIKELIHOOD = "held_out_likelihood"
METRICS = ("exact_match", "log_likelihood", "perplexity")


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

    def tokens(self) -> dict:
        """Token ids by the text of a prompt, and by the texts of a prompt and its answer."""
        pairs = {(row.prompt, row.learned): (row.prompt_ids, row.learned_ids) for row in self.rows}
        return {row.prompt: row.prompt_ids for row in reversed(self.rows)} | pairs


def read(run: Run) -> Test:
    template = prompts.template(run, str(unmerged.model(run)))
    raw = prompts.read(file(run), run.evaluate.rows)
    rows = [_row(template, row, f"{file(run)}:{number}") for number, row in enumerate(raw, 1)]
    return Test(rows, template.ends_by_text)


def file(run: Run) -> Path:
    return prompts.folder(run) / "test.jsonl"


def tasks(run: Run, test: Test) -> list[dict]:
    """Task configurations for lm_eval's TaskManager.load()."""
    from datasets import Dataset

    docs = [asdict(row) | {"reference": row.accepted[0]} for row in test.rows]
    shared = {
        "custom_dataset": lambda **_: {"test": Dataset.from_list(docs)},
        "test_split": "test",
        "doc_to_text": lambda row: row["prompt"],
        "target_delimiter": "",
        "num_fewshot": 0,
    }
    answers = {
        "task": NAME,
        "output_type": "generate_until",
        "doc_to_target": lambda row: row["reference"],
        "generation_kwargs": {"until": test.until, "do_sample": False, "max_gen_toks": run.evaluate.max_tokens},
        "process_results": lambda row, answers: {"exact_match": is_right(answers[0], row["accepted"])},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    likelihoods = {
        "task": LIKELIHOOD,
        "output_type": "loglikelihood",
        "doc_to_target": lambda row: row["learned"],
        "process_results": lambda row, results: dict.fromkeys(METRICS[1:], (results[0][0], len(row["learned_ids"]))),
        "metric_list": [
            {"metric": "log_likelihood", "aggregation": _mean, "higher_is_better": True},
            {"metric": "perplexity", "aggregation": lambda pairs: perplexity(-_mean(pairs)), "higher_is_better": False},
        ],
    }
    return [shared | answers, shared | likelihoods]


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


def _mean(scores: list[tuple[float, int]]) -> float:
    return sum(total for total, _ in scores) / sum(tokens for _, tokens in scores)
