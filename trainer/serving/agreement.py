"""Check that the served model is the trained one: both must give the same tokens the same log-probabilities.

trainer/training/parity.py wrote the trained model's log-probabilities; this module computes those of the served model
and compares. It detects a merge without the adapter, another tokenizer or rotary embedding, and weights of another
step. To detect smaller defects, it estimates `share`: the part of the adapter's effect (trained minus base) that is
missing in the served model, by least squares over tokens. Rounding errors have no direction, so their share is near 0.
The standard error of the share is computed from the same tokens, and the bound uses it.

Measurements on a tiny GLM-4-MoE in bf16, 367 tokens: rounding alone causes 0.014 to 0.017 nats per token and a share of
0.0001 +- 0.0005. If half of one layer's expert adapters are lost after 8 steps, the difference is 0.046 nats, which is
within the bound, but the share is 0.030 +- 0.002. Only the digests of an export can detect a loss below 1 %
(trainer/weights/digests.py).

With rounded weights (quantization of evaluate or export), the served model differs from the trained one by more than
the bound: FP8 changes a tiny GLM-4-MoE by 0.10 nats per token, and leaving its adapter out changes it by 1.10. In this
case the bound is a share of the distance between the trained model and the base that is rounded in the same way; the
base's evaluation writes its log-probabilities. A missing or half merged adapter exceeds this bound, however much
rounding costs. The same bound holds if training rounded the base (model.base) and the adapter is served with the
released weights. If the adapter is merged onto the weights of the training (export.merge_onto: packed), the normal
bound holds.

If the codes of the training are served (evaluate.adapter: packed), the base without the adapter shows what the kernels
round: served and in training, it differs only by them. The bound is ROUNDED times this difference on the same rows, and
at most the bound of a packed base. The share is bounded as usual.
"""

import json
import math
from itertools import chain
from pathlib import Path

from conf.model_files import config_json
from conf.rules import packed_base, shipping
from conf.rules.serving import is_apart, rounding
from conf.schema.run import Run
from contract import checksums, json_object
from contract.faults import Fault
from contract.files import write_atomically
from trainer.data.rows import Row
from trainer.serving import decoding, prompts, unmerged

# Mean difference per token, in nats. In fp32 only the order of sums differs; in bf16, weights and sums are rounded.
BOUNDS = {"fp32": 1e-3, "bf16": 0.05, "fp8": 0.1, "as_released": 0.1, "packed": 0.1}
BOUNDS |= dict.fromkeys(("int4", "nvfp4", "mxfp4"), 0.3)
WORST = 4  # times the bound, for a single prompt: rounding may send one of its tokens to another expert
LOST = 0.01  # of the adapter's effect
OF_BASE = 0.25  # of the rounded base's distance, and of the adapter's effect, if weights are rounded
ROUNDED = 3  # times the rounding of the base's kernels: on an H100 an adapter of all layers nearly doubled it
ERRORS = 5  # standard errors by which a share must differ from 0
OUTLIERS = 0.02  # share of the tokens that differ most, left out: rounding may have sent them to other experts
SUFFIXES = ("", "-best", "-ema", "-best-ema")  # of the names of training's records
RECORD = "log_probs.json"  # log-probabilities of the served model, in its evaluation's folder


def rows(run: Run) -> list[Row]:
    """Return the rows for both models: the first held-out rows, or the first training rows if none are held out."""
    files = [prompts.folder(run) / f"{name}.jsonl" for name in ("test", "validation", "training")]
    first = next((file for file in files if file.exists() and file.stat().st_size), None)
    return prompts.read(first, run.evaluate.parity_rows) if first else []


def fingerprint(run: Run) -> str:
    """Digest of the rows and the template, which decide the compared tokens."""
    facts = [prompts.record(run), rows(run)]
    return checksums.of_json(facts)


def place(run: Run, suffix: str) -> Path:
    """Path of the record of the last or the best checkpoint, or of the means of their weights."""
    path = Path(run.paths.parity)
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def is_recorded(run: Run, step: int) -> bool:
    """Whether training has written a record of this step and for these prompts."""
    if not run.evaluate.parity_rows or not rows(run):  # texts for pretraining have no prompts
        return True
    recorded = json_object.read_or_empty(Path(run.paths.parity))
    return recorded.get("step") == step and recorded.get("asked") == fingerprint(run)


def expected(run: Run) -> tuple[dict | None, str]:
    """Record of training to compare with; or None and the reason. Raises a Fault if a required record is missing."""
    mark = unmerged.mark(run)
    path = _place_of(run, mark)
    served = f"{unmerged.export(run)}/adapter" if unmerged.is_configured(run) else run.paths.served
    trained, instead = mark.get("trained"), "evaluate.parity_rows=0 compares nothing"
    if not run.evaluate.parity_rows:
        return None, "evaluate.parity_rows is 0"
    if not path.exists():
        if not trained:
            return None, f"{served} is not marked as trained, and {path} does not exist"
        if not trained["prompts"]:
            if run.export.max_loss is not None:
                raise Fault(f"export.max_loss: {run.export.max_loss:g}, but training had no prompts to compare; null")
            return None, "training had no prompts to record"
        raise Fault(
            f"paths.parity: {path}: no such file; {served} was trained to step {mark['step']}, and training wrote its "
            f"log-probabilities of {trained['prompts']} prompts to this file; {instead}"
        )
    try:
        record = json.loads(path.read_text())
        step, count = record["step"], sum(len(row["log_probs"]) for row in record["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Fault(f"paths.parity: {path}: not written by trainer.train ({error!r}); {instead}") from None
    if not count:
        raise Fault(f"paths.parity: {path}: has no tokens to compare; {instead}")
    if trained and (step != mark["step"] or record.get("weights", trained["weights"]) != trained["weights"]):
        raise Fault(
            f"paths.parity: {path}: was written at step {step} of a training, but {served} has other weights, of step "
            f"{mark['step']}; {instead}"
        )
    return record, ""


def _place_of(run: Run, mark: dict) -> Path:
    """The record of the exported weights, by their digest; else paths.parity."""
    if trained := mark.get("trained"):
        for path in (place(run, suffix) for suffix in SUFFIXES):
            record = json_object.read_or_empty(path)
            if (record.get("step"), record.get("weights")) == (mark["step"], trained["weights"]):
                return path
    return Path(run.paths.parity)


def compare(run: Run, served, precision: str) -> tuple[dict | None, str]:
    """Verdict over all tokens of all prompts; or None and the reason, if training has no record."""
    trained, reason = expected(run)
    if trained is None:
        return None, reason
    rows, bound = [row["tokens"] for row in trained["rows"]], run.evaluate.parity_bound or _bound(run, precision)
    of_base = read_base(run, rows) if is_apart(run) else None
    log_probs, written = served.read(rows), decoding.write(served, rows)
    _write(run, rows, log_probs, [tokens for tokens, _ in written])
    same_codes = packed_base.is_served(run)
    least = run.evaluate.parity_bound or BOUNDS["fp32"] if same_codes else bound
    parity = judge(trained, log_probs, least, of_base, same_codes)
    if run.export.quantization:
        parity["rounded"] = rounding_loss(trained["rows"], log_probs) | {"may_be": run.export.max_loss}
    decoded = decoding.compare(served, rows, written, bound)
    if not decoded["ok"]:
        parity["ok"] = False
        difference = f"log-probabilities of written and of read tokens differ by {decoded['mean']:.3g} nats per token"
        parity["faults"].append(f"{difference}, the bound is {bound:.3g}")
    return parity | {"decoded": decoded}, ""


def write_base(run: Run, served) -> None:
    """Write the served base's log-probabilities of the prompts on which the tuned model will be compared."""
    template = prompts.template(run, str(unmerged.model(run)))
    tokens = [[*chain(*template.tokens(row))] for row in rows(run)]
    _write(run, tokens, served.read(tokens) if tokens else [], [[] for _ in tokens])


def _write(run: Run, rows: list[list[int]], log_probs: list[list[float]], written: list[list[int]]) -> None:
    entries = [
        {"tokens": tokens, "log_probs": of_row, "written": continuation}
        for tokens, of_row, continuation in zip(rows, log_probs, written, strict=True)
    ]
    record = {"quantization": rounding(run), "rows": entries}
    write_atomically(Path(run.paths.evaluation) / RECORD, json.dumps(record), durable=True)


def read_base(run: Run, rows: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of these rows by the base, served in the same way. Raises a Fault if they are missing."""
    path, kind = Path(run.paths.of_base) / RECORD, rounding(run)
    key = "evaluate" if run.evaluate.quantization else "export"
    setting = f"with {key}.quantization={kind}" if kind else f"in a run with model.base={run.model.base}"
    advice = f"the base's evaluation {setting} writes it"
    try:
        record = json.loads(path.read_text())
        by_tokens = {tuple(row["tokens"]): [float(value) for value in row["log_probs"]] for row in record["rows"]}
        log_probs = [by_tokens[tuple(tokens)] for tokens in rows]
        fits = all(len(of_row) == len(tokens) - 1 for of_row, tokens in zip(log_probs, rows, strict=True))
        if record["quantization"] == kind and fits:
            return log_probs
    except FileNotFoundError:
        raise Fault(f"paths.of_base: {path}: no such file; {advice}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Fault(f"paths.of_base: {path}: not of these prompts ({error!r}); {advice}") from None
    raise Fault(f"paths.of_base: {path}: was served with quantization {record['quantization']!r}; {advice}")


def judge(
    trained: dict,
    log_probs: list[list[float]],
    bound: float,
    of_base: list[list[float]] | None = None,
    same_codes: bool = False,
) -> dict:
    """The verdict on a served model's log-probabilities. Those of the rounded base, if given, extend the bound.

    With the codes of training, the base may differ from training's base only by the rounding of kernels.
    """
    rows, faults = trained["rows"], []
    compared = "base_log_probs" if same_codes else "log_probs"
    base = _mean([*chain(*_differences(rows, of_base, compared))]) if of_base else None
    if base is not None:
        bound = max(bound, min(ROUNDED * base, BOUNDS["packed"]) if same_codes else OF_BASE * base)
    if same_codes and base is not None and not base <= BOUNDS["packed"]:
        difference = f"log-probabilities of the base alone differ by {base:.3g} nats per token from training's"
        faults.append(f"{difference}, the bound is {BOUNDS['packed']:.3g}")
    may_lose = LOST if base is None or same_codes else OF_BASE
    differences = _differences(rows, log_probs)
    means = [_mean(of_row) for of_row in differences]
    worst = max(range(len(rows)), key=lambda i: means[i] if means[i] == means[i] else math.inf)
    every = [*chain(*differences)]
    lost = _lost(rows, every)
    mean = _mean(every)
    if not mean <= bound:  # true for nan
        difference = f"log-probabilities differ by {mean:.3g} nats per token"
        faults.append(f"{difference}, the bound is {bound:.3g} (evaluate.parity_bound)")
    if not means[worst] <= WORST * bound:
        difference = f"those of one prompt differ by {means[worst]:.3g} nats per token"
        faults.append(f"{difference}, the bound is {WORST * bound:.3g}")
    if lost and abs(lost["share"]) > max(may_lose, ERRORS * lost["error"]):
        share = f"{lost['share']:.1%} (+- {lost['error']:.1%}) of the adapter's effect is lost"
        faults.append(f"{share}, the bound is {may_lose:.0%}")
    return {
        "ok": not faults,
        "faults": faults,
        "mean": mean,
        "max": max(map(abs, every)),
        "p90": sorted(map(abs, every))[math.ceil(0.9 * len(every)) - 1],
        "bound": bound,
        "base": base,
        "same_codes": same_codes,
        "prompts": len(rows),
        "tokens": len(every),
        "step": trained["step"],
        "worst": {"prompt": rows[worst]["prompt"], "mean": means[worst], "max": max(map(abs, differences[worst]))},
        "lost": lost,
        "may_lose": may_lose,
    }


def rounding_loss(rows: list[dict], log_probs: list[list[float]]) -> dict:
    """Nats per token of the answers by which the served model is worse than the trained one, and the standard error.

    In records of earlier versions, without prompt_tokens, all tokens count.
    """
    of_answers = (
        of_row[max(row.get("prompt_tokens", 0) - 1, 0) :]
        for of_row, row in zip(_differences(rows, log_probs), rows, strict=True)
    )
    lost = [-difference for difference in chain(*of_answers)]
    mean = sum(lost) / len(lost)
    error = math.sqrt(sum((one - mean) ** 2 for one in lost) / max(1, len(lost) - 1) / len(lost))
    return {"loss": mean, "error": error, "tokens": len(lost)}


def require_small_loss(parity: dict, kind: str | None) -> None:
    """Raise a Fault if the quantization of the export loses more than export.max_loss."""
    rounded = parity.get("rounded")
    if rounded and rounded["may_be"] is not None and not rounded["loss"] <= rounded["may_be"]:
        raise Fault(
            f"export.max_loss: {rounded['may_be']:g}, but export.quantization {kind} makes held-out answers "
            f"{_lost_in_words(rounded)} less likely than in training; the exported files are kept"
        )


def _lost_in_words(rounded: dict) -> str:
    return f"{rounded['loss']:.3g} (+- {rounded['error']:.2g}) nats per token"


def require(parity: dict) -> None:
    if not parity["ok"]:
        worst = parity["worst"]
        raise Fault(
            f"parity: the served model is not the trained one of step {parity['step']}: {'; '.join(parity['faults'])}; "
            f"worst ({worst['mean']:.3g}) at prompt {_short(worst['prompt'])!r}"
        )


def summary(parity: dict | None, reason: str) -> str:
    """One line on the comparison, or the reason why nothing was compared."""
    if parity is None:
        return f"parity: not compared, because {reason}"
    lost, worst, bound = parity["lost"], parity["worst"]["mean"], parity["bound"]
    effect = "the effect of an adapter was not recorded"
    if lost:
        share = f"{abs(lost['share']):.2%} (+- {lost['error']:.2%})"
        effect = f"{share} of the adapter's effect of {lost['effect']:.3g} lost (bound {parity['may_lose']:.0%})"
    if parity["base"] is not None:
        which = "base alone" if parity["same_codes"] else "rounded base"
        effect += f"; the {which} differs by {parity['base']:.3g} nats"
    if "rounded" in parity:
        effect += f"; quantization loses {_lost_in_words(parity['rounded'])} of the answers"
    if "decoded" in parity:
        effect += f"; {decoding.summary(parity['decoded'])}"
    return (
        f"parity: {parity['prompts']} prompts of {parity['tokens']} tokens, served and as trained to step "
        f"{parity['step']}: {parity['mean']:.3g} nats a token apart (bound {bound:.3g}), worst prompt {worst:.3g} "
        f"(bound {WORST * bound:.3g}); {effect}"
    )


def _lost(rows: list[dict], differences: list[float]) -> dict | None:
    """Share of the adapter's effect that is missing, its standard error, and the effect in nats per token."""
    if not all("base_log_probs" in row for row in rows):
        return None
    pairs = [(own, base) for row in rows for own, base in zip(row["log_probs"], row["base_log_probs"], strict=True)]
    effect = [own - base for own, base in pairs]
    tokens = sorted(zip(differences, effect, strict=True), key=lambda pair: abs(pair[0]))
    tokens = tokens[: max(2, math.ceil(len(tokens) * (1 - OUTLIERS)))]
    power = sum(e * e for _, e in tokens)
    if not power:  # an adapter without effect cannot lose any; nan is not 0
        return {"share": 0.0, "error": 0.0, "effect": 0.0}
    share = -sum(d * e for d, e in tokens) / power
    error = math.sqrt(sum((d + share * e) ** 2 for d, e in tokens) / max(1, len(tokens) - 1) / power)
    return {"share": share, "error": error, "effect": _mean(effect)}


def _mean(values: list[float]) -> float:
    return sum(map(abs, values)) / len(values)


def _differences(rows: list[dict], log_probs: list[list[float]], compared: str = "log_probs") -> list[list[float]]:
    """Differences from training's log-probabilities, for each row."""
    return [
        [a - b for a, b in zip(of_row, row[compared], strict=True)] for of_row, row in zip(log_probs, rows, strict=True)
    ]


def _bound(run: Run, precision: str) -> float:
    """Bound on the mean difference.

    Merged weights are rounded to the release's type: bf16 weights are less exact than fp32. An unmerged adapter is not
    rounded.
    """
    if kind := rounding(run) or (run.export.quantization if shipping.is_served(run) else None):
        return BOUNDS[kind]
    if is_apart(run):
        return BOUNDS["packed"]
    config = config_json.read(unmerged.model(run) / config_json.NAME)
    exact = unmerged.is_configured(run) or (config.get("dtype") or config.get("torch_dtype")) == "float32"
    return BOUNDS["fp32" if precision == "fp32" and exact else "bf16"]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
