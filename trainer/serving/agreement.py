"""Check that the served model is the trained one: both must give the same tokens the same log-probabilities.

trainer/training/parity.py wrote the trained model's log-probabilities; here the served model is asked for its own. A
merge that left the adapter out, a tokenizer or a rotary embedding that differs, or weights of another step show here. A
smaller loss shows against the effect of the adapter: `share` is the part of its effect (trained minus base) that
serving lacks, by least squares over tokens. Rounding has no direction, so its share is near 0, and its own spread says
how near: a bound that is measured.

Measured on a tiny GLM-4-MoE in bf16, 367 tokens: rounding 0.014 to 0.017 nats a token, share 0.0001 +- 0.0005; half of
one layer's expert adapters lost after 8 steps 0.046 nats, which is within the bound, share 0.030 +- 0.002. A loss below
1 % is left to the digests that an export is held to (trainer/weights/digests.py).
"""

import hashlib
import json
import math
from pathlib import Path

from conf.model_files import config_json
from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.rows import Row
from trainer.serving import prompts

# Mean difference per token, in nats. In fp32 only the order of sums differs; in bf16, weights and sums are rounded.
BOUNDS = {"fp32": 1e-3, "bf16": 0.05}
WORST = 4  # times the bound: for a single prompt, of which rounding may send a token to another expert
LOST = 0.01  # of the adapter's effect
ERRORS = 5  # standard errors that a share has to be away from 0
OUTLIERS = 0.02  # of the tokens, those that differ most: sent to other experts by rounding, they say nothing of a share


def rows(run: Run) -> list[Row]:
    """Rows that both models are asked for: the first held out of training, or of training itself where none are."""
    files = [prompts.folder(run) / f"{name}.jsonl" for name in ("test", "validation", "training")]
    found = next((file for file in files if file.exists() and file.stat().st_size), None)
    return prompts.read(found, run.evaluate.parity_rows) if found else []


def fingerprint(run: Run) -> str:
    """Digest of the tokens that both models are asked about."""
    facts = [prompts.record(run), rows(run)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def is_recorded(run: Run, step: int) -> bool:
    """Whether training has left a record to compare with, of this step and for these prompts."""
    if not run.evaluate.parity_rows or not rows(run):  # texts for pretraining have no prompts
        return True
    try:
        recorded = json.loads(Path(run.paths.parity).read_text())
        return recorded["step"] == step and recorded["asked"] == fingerprint(run)
    except (OSError, ValueError, KeyError):
        return False


def expected(run: Run) -> tuple[dict | None, str]:
    """Record of training to compare with; or None, and the reason. Raises a Fault where it is due and missing."""
    path, served, mark = Path(run.paths.parity), run.paths.served, _mark(run)
    trained, instead = mark.get("trained"), "evaluate.parity_rows=0 compares nothing"
    if not run.evaluate.parity_rows:
        return None, "evaluate.parity_rows is 0"
    if not path.exists():
        if not trained:
            return None, f"{served} is not said to be trained, and {path} does not exist"
        if not trained["prompts"]:
            return None, "training had no prompts to write anything down of"
        raise Fault(
            f"paths.parity: {path}: no such file; {served} was trained to step {mark['step']}, and training wrote down "
            f"there what it says of {trained['prompts']} prompts; {instead}"
        )
    try:
        record = json.loads(path.read_text())
        step, count = record["step"], sum(len(row["log_probs"]) for row in record["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Fault(f"paths.parity: {path}: not what trainer.train writes ({error!r}); {instead}") from None
    if not count:
        raise Fault(f"paths.parity: {path}: holds no tokens to compare; {instead}")
    if trained and (step != mark["step"] or record.get("weights", trained["weights"]) != trained["weights"]):
        raise Fault(
            f"paths.parity: {path}: was written of step {step} of a training, {served} holds other weights, of step "
            f"{mark['step']}; {instead}"
        )
    return record, ""


def compare(run: Run, served, precision: str) -> tuple[dict | None, str]:
    """Differences over all tokens of all prompts; or None, and the reason, if there is nothing to compare with."""
    trained, why = expected(run)
    if trained is None:
        return None, why
    rows = trained["rows"]
    outputs = served._model_generate([row["tokens"] for row in rows])
    found = [_served(row, output.prompt_logprobs) for row, output in zip(rows, outputs, strict=True)]
    return judge(trained, found, run.evaluate.parity_bound or _bound(run, precision)), ""


def judge(trained: dict, found: list[list[float]], bound: float) -> dict:
    rows = trained["rows"]
    apart = [
        [one - other for one, other in zip(of_row, row["log_probs"], strict=True)]
        for of_row, row in zip(found, rows, strict=True)
    ]
    means = [_mean(of_row) for of_row in apart]
    worst = max(range(len(rows)), key=lambda i: means[i] if means[i] == means[i] else math.inf)
    every = [difference for of_row in apart for difference in of_row]
    lost = _lost(rows, every)
    mean, faults = _mean(every), []
    if not mean <= bound:  # true for nan
        what = f"log-probabilities differ by {mean:.3g} nats a token"
        faults.append(f"{what}, the bound is {bound:g} (evaluate.parity_bound)")
    if not means[worst] <= WORST * bound:
        faults.append(f"of one prompt they differ by {means[worst]:.3g} nats a token, the bound is {WORST * bound:g}")
    if lost and abs(lost["share"]) > max(LOST, ERRORS * lost["error"]):
        what = f"{lost['share']:.1%} (+- {lost['error']:.1%}) of what the adapter does is lost"
        faults.append(f"{what}, the bound is {LOST:.0%}")
    return {
        "ok": not faults,
        "faults": faults,
        "mean": mean,
        "max": max(map(abs, every)),
        "bound": bound,
        "prompts": len(rows),
        "tokens": len(every),
        "step": trained["step"],
        "worst": {"prompt": rows[worst]["prompt"], "mean": means[worst], "max": max(map(abs, apart[worst]))},
        "lost": lost,
    }


def require(parity: dict) -> None:
    if not parity["ok"]:
        worst = parity["worst"]
        raise Fault(
            f"parity: the served model is not the trained one of step {parity['step']}: {'; '.join(parity['faults'])}; "
            f"worst ({worst['mean']:.3g}) at {_short(worst['prompt'])!r}"
        )


def told(parity: dict | None, why: str) -> str:
    """One line on what was compared."""
    if parity is None:
        return f"parity: not compared, because {why}"
    lost, worst, bound = parity["lost"], parity["worst"]["mean"], parity["bound"]
    effect = "the effect of an adapter was not written down"
    if lost:
        share = f"{abs(lost['share']):.2%} (+- {lost['error']:.2%})"
        effect = f"{share} of the adapter's effect of {lost['effect']:.3g} lost (bound {LOST:.0%})"
    return (
        f"parity: {parity['prompts']} prompts of {parity['tokens']} tokens, served and as trained to step "
        f"{parity['step']}: {parity['mean']:.3g} nats a token apart (bound {bound:g}), worst prompt {worst:.3g} "
        f"(bound {WORST * bound:g}); {effect}"
    )


def _mark(run: Run) -> dict:
    """Mark of the export that the served folder is part of; empty where it is part of none."""
    try:
        mark = json.loads((Path(run.paths.served).parent / "complete.json").read_text())
        return mark if "formats" in mark else {}
    except (OSError, ValueError, TypeError):
        return {}


def _lost(rows: list[dict], apart: list[float]) -> dict | None:
    """Share of the adapter's effect that is missing, its standard error, and the effect in nats a token."""
    if not all("base_log_probs" in row for row in rows):
        return None
    pairs = [(one, base) for row in rows for one, base in zip(row["log_probs"], row["base_log_probs"], strict=True)]
    effect = [one - base for one, base in pairs]
    kept = sorted(zip(apart, effect, strict=True), key=lambda pair: abs(pair[0]))
    kept = kept[: max(2, math.ceil(len(kept) * (1 - OUTLIERS)))]
    power = sum(e * e for _, e in kept)
    if not power:  # an adapter that does nothing can lose nothing; nan is not 0
        return {"share": 0.0, "error": 0.0, "effect": 0.0}
    share = -sum(d * e for d, e in kept) / power
    error = math.sqrt(sum((d + share * e) ** 2 for d, e in kept) / max(1, len(kept) - 1) / power)
    return {"share": share, "error": error, "effect": _mean(effect)}


def _mean(values: list[float]) -> float:
    return sum(map(abs, values)) / len(values)


def _served(row: dict, at_each: list) -> list[float]:
    """Log-probabilities of a row's tokens by the served model.

    prompt_logprobs has nothing for the first token, and for each other one a dictionary that holds it.
    """
    return [at[token].logprob for token, at in zip(row["tokens"][1:], at_each[1:], strict=True)]


def _bound(run: Run, precision: str) -> float:
    """Bound on the differences.

    Merged weights are rounded to the release's type: bf16 weights are not as exact as fp32.
    """
    config = config_json.read(Path(run.paths.served) / config_json.NAME)
    weights = config.get("dtype") or config.get("torch_dtype")
    return BOUNDS["fp32" if precision == "fp32" and weights == "float32" else "bf16"]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
