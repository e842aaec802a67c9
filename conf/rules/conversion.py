"""Obstacles to the conversion of a released model, found in its config.json before the weights are downloaded.

    obstacles(config, ignored) -> ["config.json: sliding_window is ...", ...]     a line per reason

    unwritable(config, run.export) -> ""        or why the merged model cannot have the format of the export

Without obstacles, trainer.convert checks every tensor.
"""

from collections.abc import Collection
from typing import Any

from conf import alternatives, families
from conf.model_files import config_json, quantization
from conf.rules import shipping
from conf.rules.function import unread
from conf.schema.export import Export

IGNORE = "model.ignore_config lists keys that do not matter to you"


def obstacles(config: dict[str, Any], ignored: Collection[str] = ()) -> list[str]:
    if refused := not_converted(config):
        return [refused]
    lines = [f"config.json: {line}" for line in unread(config, ignored)]
    if lines:
        lines[-1] += f"; the converted model would compute another function; {IGNORE}"
    try:
        quantization.scheme(config)
    except ValueError as error:
        lines.append(f"config.json: {error}; a release in bf16 works too")
    return lines


def unwritable(config: dict[str, Any], export: Export) -> str:
    """The reason why the merged model cannot have the format of an export; "" if it can."""
    quantized = export.quantization
    if export.gguf and (reason := shipping.no_gguf(config, export.gguf)):
        return reason
    if quantized in shipping.ROUNDED:
        return shipping.unwritable(config, quantized)
    scheme = quantization.scheme(config)
    if quantized in (None, "packed") or (scheme and scheme.kind == "fp8"):
        return ""
    if scheme is None:
        return f"export.quantization: {quantized}, but the release is not quantised; null"
    text = f"export.quantization: {quantized}, but rounding to the release's {scheme.bits} bits would undo the training"
    return f"{text}; null exports bf16, and export.formats=[adapter] only the adapter"


def not_converted(config: dict[str, Any]) -> str:
    """The reason why a model of this architecture cannot be converted here; "" if it can."""
    architecture, family = config_json.architecture(config), families.of(config)
    if not family.architecture:
        name = architecture or "a model without architectures in its config.json"
        reason = alternatives.reason(architecture)
        return f"{name} is not converted or trained here: {reason}; {alternatives.closest(config)}"
    if text := _own_code(config, family):
        return text
    if config.get("model_type") != family.model_type:
        kind = config_json.show(config.get("model_type"))
        return f"model_type is {kind}, and that of {architecture} is {family.model_type}"
    return ""


def _own_code(config: dict[str, Any], family: families.Family) -> str:
    """The reason why Megatron-Bridge does not take a release with code for its own model; "" if it does.

    Megatron-Bridge looks for a bridge with the name of that class, and only some bridges are registered by name.
    """
    auto_map = config.get("auto_map")
    code = str((auto_map if isinstance(auto_map, dict) else {}).get("AutoModelForCausalLM", ""))
    if not code or (family.by_name and code.rpartition(".")[2] == family.architecture):
        return ""
    text = f"auto_map names {config_json.show(code)}, code of the release, and only transformers' {family.architecture}"
    return f"{text} is converted; if both compute the same, remove auto_map from config.json in a local folder"
