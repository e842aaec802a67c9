"""Rules for the names and paths of a run's results: {name} in them, the registered model, and its metric."""

import re
from collections.abc import Iterator

from conf.schema.run import Run

SHARES = ("exact_match", "acc", "acc_norm")  # last parts of metrics that are shares of rows


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are valid alone and invalid together."""
    places = {f"paths.{key}": place for key, place in run.paths}
    for key, value in {"promote.model": run.promote.model, **places}.items():
        if set(value) & {"{", "}"}:
            yield key, f"{value}: only {{name}}, the name of the run, is allowed in braces"
    yield from _promotion(run)


def _promotion(run: Run) -> Iterator[tuple[str, str]]:
    promote = run.promote
    if re.search(r"[/:'\"]|^\.+$", promote.model):
        yield "promote.model", f"{promote.model}: MLflow's registry does not allow slashes, colons or quotes in names"
    if promote.metric.endswith("/"):
        yield "promote.metric", f"{promote.metric} is a task without a metric, such as held_out/exact_match"
    if promote.margin >= 1 and promote.metric.rpartition("/")[2] in SHARES:
        yield "promote.margin", f"{promote.margin:g}, but {promote.metric} is a share: below 1"
