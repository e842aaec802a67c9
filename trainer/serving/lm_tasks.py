"""Tasks of lm-eval: found by name or file, asked of a served model, and their results as plain metrics and samples."""

import math
import random
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import held_out, prompts


def load(run: Run, names: list[str], test: held_out.Test | None) -> dict[str, dict]:
    """Load the tasks by name, each as what lm-eval calls a task dictionary.

    Data that are not on this disk are downloaded.
    """
    from lm_eval.tasks import TaskManager

    known = any(name != held_out.NAME and not prompts.is_task_file(name) for name in names)
    manager = TaskManager(include_defaults=known)  # reading lm-eval's 14,000 task files takes seconds
    tasks = {}
    for name in names:
        if name == held_out.NAME and test:
            tasks[name] = manager.load(held_out.tasks(run, test))
        else:
            tasks[name] = _load_other(manager, name)
        for task in tasks[name]["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=run.evaluate.seed)
    return tasks


def _load_other(manager, name: str) -> dict:
    if not prompts.is_task_file(name) and name not in manager.all_tasks:
        near = get_close_matches(name, [held_out.NAME, *manager.all_tasks], n=3)
        meant = f"; did you mean {', '.join(near)}?" if near else ""
        raise Fault(f"evaluate.tasks: {name} is neither held_out, nor a task of lm-eval, nor a YAML file{meant}")
    try:
        return manager.load([name])
    except Exception as error:  # of any kind: whatever datasets, the Hub, or a task's own code raises
        raise Fault(f"evaluate.tasks: {name}: {type(error).__name__}: {_first_line(error)}") from error


def ask(run: Run, served, tasks: dict) -> dict:
    """Ask the model.

    Returns metrics and scores of rows by "task/metric", and the number of rows and samples by task.
    """
    import numpy
    import torch
    from lm_eval import evaluator

    random.seed(run.evaluate.seed)
    numpy.random.seed(run.evaluate.seed)
    torch.manual_seed(run.evaluate.seed)
    found: Any = evaluator.evaluate(served, tasks, limit=run.evaluate.rows, bootstrap_iters=1000, log_samples=True)
    metrics = {
        f"{_shown(task)}/{_metric(key)}": float(value)
        for task, values in found["results"].items()
        for key, value in values.items()
        if "," in key and isinstance(value, int | float)
    }
    if not metrics:
        raise Fault(f"evaluate.tasks: {', '.join(found['results'])}: no metric came out; its metric_list is empty")
    rows = {_shown(task): counts["effective"] for task, counts in found["n-samples"].items()}
    samples = {
        task: [_sample(task, one) for one in every[: run.evaluate.samples]]
        for task, every in found["samples"].items()
        if task != held_out.LIKELIHOOD
    }
    scores = {name: rows for task, every in found["samples"].items() for name, rows in _scores(task, every, metrics)}
    return {"metrics": metrics, "rows": rows, "samples": samples, "scores": scores}


def _scores(task: str, every: list[dict], metrics: dict[str, float]) -> Iterator[tuple[str, list[list[float]]]]:
    """Scores of the rows, of each metric that is a function of their mean: of the mean itself, exp(-mean), or bits.

    A task has a sample for each row and filter. A score is a number, or a sum and how many values it has.
    """
    for chosen in dict.fromkeys(one["filter"] for one in every):
        rows = [one for one in every if one["filter"] == chosen]
        for metric in rows[0]["metrics"]:
            name = f"{_shown(task)}/{_metric(f'{metric},{chosen}')}"
            found = [_score(one.get(metric)) for one in rows]
            scores = [score for score in found if score]
            if name in metrics and len(scores) == len(found) and _is_of_mean(metrics[name], scores):
                yield name, scores


def _score(value: Any) -> list[float] | None:
    """A row's score as a sum and the number of its values; None if it is not one."""
    pair = value if isinstance(value, tuple | list) else (value, 1)
    if len(pair) != 2 or not all(isinstance(one, int | float) and math.isfinite(one) for one in pair):
        return None
    return [float(one) for one in pair]


def _is_of_mean(value: float, scores: list[list[float]]) -> bool:
    total, count = (math.fsum(column) for column in zip(*scores, strict=True))
    if not count:
        return False
    mean = total / count
    return any(math.isclose(value, one, rel_tol=1e-6) for one in (mean, perplexity(-mean), -mean / math.log(2)))


def _shown(task: str) -> str:
    return held_out.NAME if task == held_out.LIKELIHOOD else task


def _metric(key: str) -> str:
    """Name of a metric without a comma, as MLflow takes none.

    exact_match,none becomes exact_match, and exact_match,strict-match becomes exact_match/strict-match.
    """
    metric, chosen = key.split(",", 1)
    return metric if chosen == "none" else f"{metric}/{chosen}"


def _sample(task: str, one: dict) -> dict:
    answer = one["filtered_resps"][0]
    answer = answer if isinstance(answer, str) else str(one["filtered_resps"])
    score = next((one[name] for name in ("exact_match", "acc", *one["metrics"]) if name in one), None)
    reference = one["doc"]["reference"] if task == held_out.NAME else str(one["target"])
    correct = bool(score == 1) if isinstance(score, int | float) else None
    return {"prompt": str(one["arguments"][0][0]), "answer": answer, "reference": reference, "correct": correct}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
