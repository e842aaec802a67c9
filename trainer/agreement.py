"""Whether the served model is the trained one: both must give the same tokens the same log-probabilities.

trainer/parity.py wrote what the trained model says; here the served one is asked. A merge that left the adapter out, a
tokenizer or a rotary embedding that differs, weights of another step: all of them show here and nowhere else.
"""

import hashlib
import json
from pathlib import Path

from conf.model_files import config_json
from conf.schema import Run
from trainer import asked
from trainer.data.rows import Row
from trainer.faults import Fault

# Mean difference per token, in nats. In fp32 only the order of sums differs; in bf16, weights and sums are rounded.
BOUNDS = {"fp32": 1e-3, "bf16": 0.05}


def rows(run: Run) -> list[Row]:
    """What both are asked: the first rows held out of training, or of training itself where none are."""
    files = [asked.folder(run) / f"{name}.jsonl" for name in ("test", "validation", "training")]
    found = next((file for file in files if file.exists() and file.stat().st_size), None)
    return asked.read(found, run.evaluate.parity_rows) if found else []


def fingerprint(run: Run) -> str:
    """Changes with the tokens that are asked about."""
    facts = [asked.record(run), rows(run)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def is_recorded(run: Run, step: int) -> bool:
    """Whether training has left what is to be compared: of this step, for these prompts."""
    if not run.evaluate.parity_rows or not rows(run):  # texts for pretraining have no prompts
        return True
    try:
        recorded = json.loads(Path(run.paths.parity).read_text())
        return recorded["step"] == step and recorded["asked"] == fingerprint(run)
    except (OSError, ValueError, KeyError):
        return False


def compare(run: Run, served, precision: str) -> dict | None:
    """Differences over all tokens of all prompts; None if training left nothing to compare with."""
    path = Path(run.paths.parity)
    if not run.evaluate.parity_rows or not path.exists():
        return None
    trained = json.loads(path.read_text())
    rows = trained["rows"]
    outputs = served._model_generate([row["tokens"] for row in rows])
    differences = [_differences(row, output.prompt_logprobs) for row, output in zip(rows, outputs, strict=True)]
    means = [sum(of_row) / len(of_row) for of_row in differences]
    worst = means.index(max(means))
    every = [difference for of_row in differences for difference in of_row]
    mean, bound = sum(every) / len(every), run.evaluate.parity_bound or _bound(run, precision)
    return {
        "ok": mean <= bound,  # false for nan
        "mean": mean,
        "max": max(every),
        "bound": bound,
        "prompts": len(rows),
        "tokens": len(every),
        "step": trained["step"],
        "worst": {"prompt": rows[worst]["prompt"], "mean": means[worst], "max": max(differences[worst])},
    }


def require(parity: dict) -> None:
    if not parity["ok"]:
        raise Fault(
            f"parity: the served model is not the trained one of step {parity['step']}: log-probabilities differ by "
            f"{parity['mean']:.3g} nats a token, the bound is {parity['bound']:g} (evaluate.parity_bound); "
            f"worst ({parity['worst']['mean']:.3g}) at {_short(parity['worst']['prompt'])!r}"
        )


def _differences(row: dict, served: list) -> list[float]:
    """prompt_logprobs has nothing for the first token, and for each other one a dictionary that holds it."""
    found = [at[token].logprob for token, at in zip(row["tokens"][1:], served[1:], strict=True)]
    return [abs(one - other) for one, other in zip(found, row["log_probs"], strict=True)]


def _bound(run: Run, precision: str) -> float:
    """Merged weights are rounded to the type of the release: with bf16 weights nothing is as exact as fp32."""
    config = config_json.read(Path(run.paths.served) / config_json.NAME)
    weights = config.get("dtype") or config.get("torch_dtype")
    return BOUNDS["fp32" if precision == "fp32" and weights == "float32" else "bf16"]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
