"""MLflow runs of a study: one for each layout that was measured, to be compared there, and one with the report."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks import tracking

FIGURES = (  # under the names of a training's curves in MLflow if such a curve exists
    ("ms", "study/ms_a_step"),
    ("planned_ms", "study/planned_ms"),
    ("of_planned_ms", "study/times_of_planned"),
    ("tokens_per_second_per_gpu", "speed/tokens_per_second_per_gpu"),
    ("tflops", "speed/tflops"),
    ("product_tflops", "study/product_tflops"),
    ("share_of_product", "study/share_of_product"),
    ("gb", "study/gb_of_the_fullest"),
    ("planned_gb", "study/planned_gb"),
)
LOSS = "loss/training"
SHARES = ("computing", "exposed", "hidden", "idle")


def tell(runs: Path, experiment: str, report: dict[str, Any], files: Sequence[Path]) -> str:
    """Hand the report's rows to a process that ships them. Returns a line that says what became of them."""
    if find_spec("mlflow") is None:
        return "tracking: MLflow is not installed here; run --report on a host that has it, with this folder"
    name, now = report["name"], time.strftime("%Y%m%d-%H%M%S")
    whole = tracking.start(runs, None, experiment, f"study-{name}-{now}", f"study {name}", tags={"study": name})
    for row in report["rows"]:
        if "failed" not in row["figures"]:
            _tell_row(whole, row, {"study": name, **report["versions"]})
    for file in files:
        whole.file(file, file.name)
    whole.end()
    whole.close()
    return f"tracking: experiment {experiment} gets a run for each layout, and study {name} with this report"


def _tell_row(whole: tracking.Tracking, row: dict[str, Any], tags: dict[str, str]) -> None:
    figures = row["figures"]
    params = dict(text.split("=", 1) for text in row["overrides"]) | {"configuration": row["configuration"]}
    stage = whole.stage(row["title"], tags=tags, params=params)
    stage.metrics({name: figures[key] for key, name in FIGURES})
    if "time" in figures:
        stage.metrics({f"study/{share}": figures["time"][share] for share in SHARES})
    for step, loss in enumerate(figures["losses"], 1):
        stage.metrics({LOSS: loss}, step)
    stage.end()
