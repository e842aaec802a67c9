"""Exports of a merged model in other formats: export.quantization in 8 or 4 bits, export.max_loss and export.gguf.

    is_rounded(run)          whether the merged model is rounded to one of these formats
    is_served(run)           whether the tuned model is evaluated in that form
    of_base(run)             the run of the base's evaluation, which is the same for all formats
    unwritable(config, ...)  the reason why a model cannot have a format, for conf/rules/conversion.py
    no_gguf(config, ...)     the same for a GGUF file
    rotation(config)         the kind of rotary embedding and its numbers
    contradictions(run)      (key, problem), for conf/rules/contradictions.py

The base is evaluated as released, so the comparison with the tuned model includes the loss of rounding.
"""

from collections.abc import Iterator
from typing import Any

from conf import families, model_facts
from conf.schema.run import Run

ROUNDED = ("fp8", "int4", "nvfp4", "mxfp4")  # names of packed_base.FORMATS
ROTATIONS = ("default", "llama3")  # that a GGUF file describes
GGUF_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "q8_0": 1.0625}  # of a number, with its share of scales


def is_rounded(run: Run) -> bool:
    return run.export.quantization in ROUNDED


def is_served(run: Run) -> bool:
    return is_rounded(run) and run.evaluate.adapter == "merged"


def of_base(run: Run) -> Run:
    form = ROUNDED[0] if is_served(run) else run.export.quantization
    return run.changed(export={"quantization": form, "max_loss": None})


def unwritable(config: dict[str, Any], kind: str) -> str:
    tensors = families.of(config).tensors(model_facts.facts_from_hf(config)).values()
    odd = next((tensor for tensor in tensors if tensor.matrix and (tensor.stacked or tensor.turned)), None)
    if odd is None:
        return ""
    shape = "one tensor of all experts" if odd.stacked else "transposed matrices"
    return f"export.quantization: {kind}, but the release has {shape} ({odd.name}), and the format has none; null"


def no_gguf(config: dict[str, Any], kind: str) -> str:
    family = families.of(config)
    if not family.gguf:
        known = ", ".join(sorted(other.architecture for other in families.every().values() if other.gguf))
        return f"export.gguf: {kind}, but files of {family.architecture} were not compared; null, or a model of {known}"
    if (rotary := rotation(config)["rope_type"]) not in ROTATIONS:
        return f"export.gguf: {kind}, but the file has no rotary embedding of kind {rotary}; null"
    return ""


def rotation(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor") or families.of(config).defaults.get("partial_rotary_factor", 1)
    usual = {"rope_theta": config.get("rope_theta", 10000.0), "partial_rotary_factor": share}
    return usual | given | {"rope_type": given.get("rope_type") or given.get("type") or "default"}


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    export = run.export
    if export.gguf and "merged" not in (export.formats or ("merged",)):
        yield "export.gguf", f"{export.gguf}, but export.formats lacks merged, its source; null"
    if export.gguf and export.quantization:
        yield "export.gguf", f"{export.gguf}, but export.quantization {export.quantization} leaves codes; null for one"
    if is_rounded(run) and "merged" not in (export.formats or ("merged",)):
        yield "export.quantization", f"{export.quantization}, but export.formats lacks merged; null"
    if export.max_loss is None:
        return
    key, measured = "export.max_loss", f"{export.max_loss:g}, but the evaluation measures it, and"
    if export.quantization in (None, "packed"):
        yield key, f"{export.max_loss:g}, but export.quantization rounds no merged weights; such as int4, or null"
    elif not run.evaluate.tasks:
        yield key, f"{measured} evaluate.tasks is empty; null"
    elif not run.evaluate.parity_rows:
        yield key, f"{measured} evaluate.parity_rows is 0, the number of its rows; null"
    elif run.evaluate.adapter != "merged":
        yield key, f"{measured} evaluate.adapter {run.evaluate.adapter} serves another form; merged"
