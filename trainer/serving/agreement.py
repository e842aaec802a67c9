"""Check that the served model is the trained one: both must give the same tokens the same log-probabilities.

trainer/training/parity.py wrote the trained model's log-probabilities; here the served model is asked for its own. A
merge that left the adapter out, a tokenizer or a rotary embedding that differs, or weights of another step show here. A
smaller loss shows against the effect of the adapter: `share` is the part of its effect (trained minus base) that
serving lacks, by least squares over tokens. Rounding has no direction, so its share is near 0, and its own spread says
how near: a bound that is measured.

Measured on a tiny GLM-4-MoE in bf16, 367 tokens: rounding 0.014 to 0.017 nats a token, share 0.0001 +- 0.0005; half of
one layer's expert adapters lost after 8 steps 0.046 nats, which is within the bound, share 0.030 +- 0.002. A loss below
1 % is left to the digests that an export is held to (trainer/weights/digests.py).

Served with rounded weights (quantization, of evaluate or export), a model differs from itself by more than the bound:
FP8 moves a tiny GLM-4-MoE by 0.10 nats a token, where leaving its adapter out moves it by 1.10. So the bound is then a
share of what lies between the base, rounded in the same way, and the trained model. The base's evaluation writes its
log-probabilities down. A missing or half merged adapter is beyond that whatever rounding costs. The same holds where
training rounded the base (model.base), and the adapter is served with the released weights. Merged onto what training
had (export.merge_onto: packed), a model has the bound of any other.
"""

import contextlib
import hashlib
import json
import math
from itertools import chain
from pathlib import Path

from conf.model_files import config_json
from conf.rules.serving import is_apart, rounding
from conf.schema.run import Run
from contract.faults import Fault
from contract.files import write_atomically
from trainer.data.rows import Row
from trainer.serving import decoding, prompts, unmerged

# Mean difference per token, in nats. In fp32 only the order of sums differs; in bf16, weights and sums are rounded.
BOUNDS = {"fp32": 1e-3, "bf16": 0.05, "fp8": 0.1, "as_released": 0.1, "packed": 0.1}
WORST = 4  # times the bound: for a single prompt, of which rounding may send a token to another expert
LOST = 0.01  # of the adapter's effect
OF_BASE = 0.25  # of the rounded base's distance, and so of the adapter's effect, where weights are rounded
ERRORS = 5  # standard errors that a share has to be away from 0
OUTLIERS = 0.02  # of the tokens, those that differ most: sent to other experts by rounding, they say nothing of a share
WHICH = ("", "-best", "-ema", "-best-ema")  # records of training, behind the name
RECORD = "log_probs.json"  # what the served model says, in its evaluation's folder


def rows(run: Run) -> list[Row]:
    """Rows that both models are asked for: the first held out of training, or of training itself where none are."""
    files = [prompts.folder(run) / f"{name}.jsonl" for name in ("test", "validation", "training")]
    found = next((file for file in files if file.exists() and file.stat().st_size), None)
    return prompts.read(found, run.evaluate.parity_rows) if found else []


def fingerprint(run: Run) -> str:
    """Digest of the tokens that both models are asked about."""
    facts = [prompts.record(run), rows(run)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def place(run: Run, which: str) -> Path:
    """Record of the last checkpoint, of the best one where that is another, or of the means of their weights."""
    path = Path(run.paths.parity)
    return path.with_name(f"{path.stem}{which}{path.suffix}")


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
    mark = unmerged.mark(run)
    path = _place_of(run, mark)
    served = f"{unmerged.export(run)}/adapter" if unmerged.is_asked(run) else run.paths.served
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


def _place_of(run: Run, mark: dict) -> Path:
    """The record of the exported weights, by their digest; else paths.parity."""
    if trained := mark.get("trained"):
        for path in (place(run, which) for which in WHICH):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text())
                if record["step"] == mark["step"] and record["weights"] == trained["weights"]:
                    return path
    return Path(run.paths.parity)


def compare(run: Run, served, precision: str) -> tuple[dict | None, str]:
    """Differences over all tokens of all prompts; or None, and the reason, if there is nothing to compare with."""
    trained, why = expected(run)
    if trained is None:
        return None, why
    asked, bound = [row["tokens"] for row in trained["rows"]], run.evaluate.parity_bound or _bound(run, precision)
    of_base = read_base(run, asked) if is_apart(run) else None
    found, written = served.read(asked), decoding.write(served, asked)
    _write(run, asked, found, [tokens for tokens, _ in written])
    parity, decoded = judge(trained, found, bound, of_base), decoding.compare(served, asked, written, bound)
    if not decoded["ok"]:
        parity["ok"] = False
        what = f"{decoded['mean']:.3g} nats a token between what it says of tokens that it writes and that it reads"
        parity["faults"].append(f"{what}, the bound is {bound:.3g}")
    return parity | {"decoded": decoded}, ""


def write_base(run: Run, served) -> None:
    """Write down what the served base says of the prompts that its tuned model will be asked for."""
    template = prompts.template(run, str(unmerged.model(run)))
    asked = [[*chain(*template.tokens(row))] for row in rows(run)]
    _write(run, asked, served.read(asked) if asked else [], [[] for _ in asked])


def _write(run: Run, asked: list[list[int]], found: list[list[float]], written: list[list[int]]) -> None:
    rows = [
        {"tokens": tokens, "log_probs": log_probs, "written": behind}
        for tokens, log_probs, behind in zip(asked, found, written, strict=True)
    ]
    record = {"quantization": rounding(run), "rows": rows}
    write_atomically(Path(run.paths.evaluation) / RECORD, json.dumps(record), durable=True)


def read_base(run: Run, asked: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of these tokens by the base, served in the same way. Raises a Fault where there are none."""
    path, kind = Path(run.paths.of_base) / RECORD, rounding(run)
    key = "evaluate" if run.evaluate.quantization else "export"
    how = f"with {key}.quantization={kind}" if kind else f"in a run with model.base={run.model.base}"
    mend = f"the base's evaluation {how} writes it"
    try:
        record = json.loads(path.read_text())
        found = {tuple(row["tokens"]): [float(value) for value in row["log_probs"]] for row in record["rows"]}
        as_asked = [found[tuple(tokens)] for tokens in asked]
        fits = all(len(one) == len(tokens) - 1 for one, tokens in zip(as_asked, asked, strict=True))
        if record["quantization"] == kind and fits:
            return as_asked
    except FileNotFoundError:
        raise Fault(f"paths.of_base: {path}: no such file; {mend}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Fault(f"paths.of_base: {path}: not of these prompts ({error!r}); {mend}") from None
    raise Fault(f"paths.of_base: {path}: was served otherwise, quantization {record['quantization']!r}; {mend}")


def judge(trained: dict, found: list[list[float]], bound: float, of_base: list[list[float]] | None = None) -> dict:
    """The verdict on a served model's log-probabilities. With the base's, of rounded weights, they extend the bound."""
    rows = trained["rows"]
    base = _distance(rows, of_base) if of_base else None
    if base is not None:
        bound = max(bound, OF_BASE * base)
    may_lose = LOST if base is None else OF_BASE
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
        faults.append(f"{what}, the bound is {bound:.3g} (evaluate.parity_bound)")
    if not means[worst] <= WORST * bound:
        faults.append(f"of one prompt they differ by {means[worst]:.3g} nats a token, the bound is {WORST * bound:.3g}")
    if lost and abs(lost["share"]) > max(may_lose, ERRORS * lost["error"]):
        what = f"{lost['share']:.1%} (+- {lost['error']:.1%}) of what the adapter does is lost"
        faults.append(f"{what}, the bound is {may_lose:.0%}")
    return {
        "ok": not faults,
        "faults": faults,
        "mean": mean,
        "max": max(map(abs, every)),
        "p90": sorted(map(abs, every))[math.ceil(0.9 * len(every)) - 1],
        "bound": bound,
        "base": base,
        "prompts": len(rows),
        "tokens": len(every),
        "step": trained["step"],
        "worst": {"prompt": rows[worst]["prompt"], "mean": means[worst], "max": max(map(abs, apart[worst]))},
        "lost": lost,
        "may_lose": may_lose,
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
        effect = f"{share} of the adapter's effect of {lost['effect']:.3g} lost (bound {parity['may_lose']:.0%})"
    if parity["base"] is not None:
        effect += f"; the base, as rounded, is {parity['base']:.3g} nats apart"
    if "decoded" in parity:
        effect += f"; {decoding.told(parity['decoded'])}"
    return (
        f"parity: {parity['prompts']} prompts of {parity['tokens']} tokens, served and as trained to step "
        f"{parity['step']}: {parity['mean']:.3g} nats a token apart (bound {bound:.3g}), worst prompt {worst:.3g} "
        f"(bound {WORST * bound:.3g}); {effect}"
    )


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


def _distance(rows: list[dict], found: list[list[float]]) -> float:
    """Mean difference from what training says."""
    pairs = zip(found, (row["log_probs"] for row in rows), strict=True)
    return _mean([one - other for pair in pairs for one, other in zip(*pair, strict=True)])


def _bound(run: Run, precision: str) -> float:
    """Bound on the differences.

    Merged weights are rounded to the release's type: bf16 weights are not as exact as fp32. An adapter that is served
    beside them is not rounded.
    """
    if kind := rounding(run):
        return BOUNDS[kind]
    if is_apart(run):
        return BOUNDS["packed"]
    config = config_json.read(unmerged.model(run) / config_json.NAME)
    exact = unmerged.is_asked(run) or (config.get("dtype") or config.get("torch_dtype")) == "float32"
    return BOUNDS["fp32" if precision == "fp32" and exact else "bf16"]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
