"""Obstacles to the conversion of a released model, found in its config.json before anything else is downloaded.

    obstacles(config, ignored) -> ["config.json: sliding_window is ...", ...]     a line per reason

    unwritable(config, export.quantization) -> ""        or why the merged model cannot have the release's format

Where there is none, trainer.convert checks every tensor.
"""

from collections.abc import Collection
from typing import Any

from conf import families
from conf.alternatives import closest
from conf.families import unsupported
from conf.model_files import config_json, quantization
from conf.rules.function import unread

IGNORE = "model.ignore_config lists keys that do not matter to you"


def obstacles(config: dict[str, Any], ignored: Collection[str] = ()) -> list[str]:
    if refused := not_converted(config):
        return [refused]
    found = [f"config.json: {line}" for line in unread(config, ignored)]
    if found:
        found[-1] += f"; the converted model would compute another function; {IGNORE}"
    try:
        quantization.scheme(config)
    except ValueError as error:
        found.append(f"config.json: {error}; a release in bf16 can be taken, too")
    return found


def unwritable(config: dict[str, Any], wanted: str | None) -> str:
    """The reason why a merged model cannot be written in the release's own format, if it is wanted; "" where it can."""
    found = quantization.scheme(config)
    if wanted is None or (found and found.kind == "fp8"):
        return ""
    if found is None:
        return f"export.quantization: {wanted}, but the release is not quantised; null"
    text = (
        f"export.quantization: {wanted}, but what training adds would be lost in the {found.bits} bits of the release"
    )
    return f"{text}; null exports bf16, and export.formats=[adapter] the adapter alone"


def not_converted(config: dict[str, Any]) -> str:
    """The reason why a model of this architecture cannot be converted here; "" if it can."""
    architecture, family = config_json.architecture(config), families.of(config)
    if not family.architecture:
        name = architecture or "a model without architectures in its config.json"
        reason = unsupported.reason(architecture)
        return f"{name} is not converted or trained here: {reason}; {closest(config)}"
    if text := _own_code(config, family):
        return text
    if config.get("model_type") != family.model_type:
        kind = config_json.show(config.get("model_type"))
        return f"model_type is {kind}, and that of {architecture} is {family.model_type}"
    return ""


def _own_code(config: dict[str, Any], family: families.Family) -> str:
    """The reason why Megatron-Bridge does not take a release with code for its own model; "" if it does.

    Megatron-Bridge looks for a bridge by the name of that class, and finds only bridges registered by a name.
    """
    auto_map = config.get("auto_map")
    code = str((auto_map if isinstance(auto_map, dict) else {}).get("AutoModelForCausalLM", ""))
    if not code or (family.by_name and code.rpartition(".")[2] == family.architecture):
        return ""
    text = f"auto_map names {config_json.show(code)}, code of the release, and only transformers' {family.architecture}"
    return f"{text} is converted; if both compute the same, remove auto_map from config.json in a local folder"
