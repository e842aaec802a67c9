"""Load tasks of lm-eval by name or file, evaluate a served model on them, and return plain metrics and samples."""

import math
import random
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import held_out, prompts


def load(run: Run, names: list[str]) -> dict[str, dict]:
    """Load the tasks by name, each as a task dictionary of lm-eval. Data that are not on this disk are downloaded."""
    from lm_eval.tasks import TaskManager

    by_name = any(not prompts.is_task_file(name) for name in names)
    manager = TaskManager(include_defaults=by_name)  # reading lm-eval's 14,000 task files takes seconds
    tasks = {name: _load(manager, name) for name in names}
    for task in (task for loaded in tasks.values() for task in loaded["tasks"].values()):
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=run.evaluate.seed)
    return tasks


def _load(manager, name: str) -> dict:
    if not prompts.is_task_file(name) and name not in manager.all_tasks:
        near = get_close_matches(name, [held_out.NAME, *manager.all_tasks], n=3)
        advice = f"; did you mean {', '.join(near)}?" if near else ""
        raise Fault(f"evaluate.tasks: {name} is neither held_out, nor a task of lm-eval, nor a YAML file{advice}")
    try:
        return manager.load([name])
    except Exception as error:  # any kind: datasets, the Hub and a task's own code raise different ones
        line = str(error).strip().partition("\n")[0]
        raise Fault(f"evaluate.tasks: {name}: {type(error).__name__}: {line}") from error


def ask(run: Run, served, tasks: dict) -> dict:
    """Evaluate the model. Returns metrics and row scores by "task/metric", and number of rows and samples by task."""
    import numpy
    import torch
    from lm_eval import evaluator

    random.seed(run.evaluate.seed)
    numpy.random.seed(run.evaluate.seed)
    torch.manual_seed(run.evaluate.seed)
    results: Any = evaluator.evaluate(served, tasks, limit=run.evaluate.rows, bootstrap_iters=1000, log_samples=True)
    metrics = {
        f"{task}/{_metric(key)}": float(value)
        for task, values in results["results"].items()
        for key, value in values.items()
        if "," in key and isinstance(value, int | float)
    }
    if not metrics:
        raise Fault(f"evaluate.tasks: {', '.join(results['results'])}: no metric, because its metric_list is empty")
    rows = {task: counts["effective"] for task, counts in results["n-samples"].items()}
    samples = {
        task: [_sample(sample) for sample in of_task[: run.evaluate.samples]]
        for task, of_task in results["samples"].items()
    }
    by_task = results["samples"].items()
    scores = {name: rows for task, of_task in by_task for name, rows in _scores(task, of_task, metrics)}
    return {"metrics": metrics, "rows": rows, "samples": samples, "scores": scores}


def _scores(task: str, samples: list[dict], metrics: dict[str, float]) -> Iterator[tuple[str, list[list[float]]]]:
    """Row scores of each metric that is a function of their mean: the mean, exp(-mean), or the mean in bits.

    A task has a sample for each row and filter. A score is a number, or a sum and the number of its values.
    """
    for chosen in dict.fromkeys(sample["filter"] for sample in samples):
        rows = [sample for sample in samples if sample["filter"] == chosen]
        for metric in rows[0]["metrics"]:
            name = f"{task}/{_metric(f'{metric},{chosen}')}"
            scores = [_score(row.get(metric)) for row in rows]
            valid = [score for score in scores if score]
            if name in metrics and len(valid) == len(scores) and _is_of_mean(metrics[name], valid):
                yield name, valid


def _score(value: Any) -> list[float] | None:
    """A row's score as a sum and the number of its values; None if the value is not a score."""
    pair = value if isinstance(value, tuple | list) else (value, 1)
    if len(pair) != 2 or not all(isinstance(number, int | float) and math.isfinite(number) for number in pair):
        return None
    return [float(number) for number in pair]


def _is_of_mean(value: float, scores: list[list[float]]) -> bool:
    total, count = (math.fsum(column) for column in zip(*scores, strict=True))
    if not count:
        return False
    mean = total / count
    functions = (mean, perplexity(-mean), -mean / math.log(2))
    return any(math.isclose(value, of_mean, rel_tol=1e-6) for of_mean in functions)


def _metric(key: str) -> str:
    """Name of a metric without a comma, which MLflow does not allow.

    exact_match,none becomes exact_match, and exact_match,strict-match becomes exact_match/strict-match.
    """
    metric, chosen = key.split(",", 1)
    return metric if chosen == "none" else f"{metric}/{chosen}"


def _sample(sample: dict) -> dict:
    answer = sample["filtered_resps"][0]
    answer = answer if isinstance(answer, str) else str(sample["filtered_resps"])
    score = next((sample[name] for name in ("exact_match", "acc", *sample["metrics"]) if name in sample), None)
    correct = bool(score == 1) if isinstance(score, int | float) else None
    return {
        "prompt": str(sample["arguments"][0][0]),
        "answer": answer,
        "reference": str(sample["target"]),
        "correct": correct,
    }
