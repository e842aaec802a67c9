"""Obstacles to the conversion of a released model, found in its config.json before the weights are downloaded.

    obstacles(config, ignored) -> ["config.json: sliding_window is ...", ...]     a line per reason

    unwritable(config, export.quantization) -> ""        or why the merged model cannot have the release's format

Without obstacles, trainer.convert checks every tensor.
"""

from collections.abc import Collection
from typing import Any

from conf.alternatives import closest
from conf.model_facts import ALIASES, CONVERTED
from conf.model_files import config_json, quantization
from conf.rules.function import unread

IGNORE = "model.ignore_config lists keys that do not matter to you"

# Families that are not supported here, and why.
DELTA_NET = "the export does not support Megatron-Bridge's layout of its gated delta net and its shifted norms"
GEMMA = (
    "Megatron-Bridge adds adapters after the norms that follow o_proj and down_proj, but merging adds them before the "
    "norms, and its windows and soft caps have not been compared on a GPU"
)
INDEXER = "its attention selects tokens with an indexer, whose GPU kernels have not been compared"
NO_BRIDGE = "Megatron-Bridge 0.6 has no bridge for it"
NOT_TAKEN = {
    "Qwen3NextForCausalLM": DELTA_NET,
    "Qwen3_5ForCausalLM": DELTA_NET,
    "Qwen3_5ForConditionalGeneration": DELTA_NET,
    "Qwen3_5MoeForCausalLM": DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": DELTA_NET,
    "NemotronHForCausalLM": "the export does not support Megatron-Bridge's layout of its Mamba layers",
    "Llama4ForCausalLM": NO_BRIDGE,
    "Llama4ForConditionalGeneration": NO_BRIDGE,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": GEMMA,
    "GlmMoeDsaForCausalLM": INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": INDEXER,
}
# Other families with a bridge in Megatron-Bridge 0.6.
BRIDGED = {
    *("BailingMoeV2ForCausalLM", "DeciLMForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM"),
    *("Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    *("FalconH1ForCausalLM", "GemmaForCausalLM", "Gemma4ForCausalLM", "HYV3ForCausalLM", "KimiK2ForCausalLM"),
    *("MiMoForCausalLM", "MiMoV2FlashForCausalLM", "NemotronForCausalLM", "SarvamMLAForCausalLM"),
    *("SarvamMoEForCausalLM", "Step3p5ForCausalLM"),
}
# Families that Megatron-Bridge registers by name, as their releases contain code for older versions of transformers.
BY_NAME = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MiniMaxM2ForCausalLM")
UNTRIED = (
    "Megatron-Bridge 0.6 has a bridge for it, but the trained and exported model was not compared with transformers"
)
MORE_THAN_TEXT = "it reads more than text, but only text models are supported"


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


def unwritable(config: dict[str, Any], quantized: str | None) -> str:
    """The reason why the merged model cannot have the release's format, if export.quantization is set; "" if it can."""
    scheme = quantization.scheme(config)
    if quantized is None or (scheme and scheme.kind == "fp8"):
        return ""
    if scheme is None:
        return f"export.quantization: {quantized}, but the release is not quantised; null"
    text = f"export.quantization: {quantized}, but rounding to the release's {scheme.bits} bits would undo the training"
    return f"{text}; null exports bf16, and export.formats=[adapter] only the adapter"


def not_converted(config: dict[str, Any]) -> str:
    """The reason why a model of this architecture cannot be converted; "" if it can."""
    architecture = config_json.architecture(config)
    if architecture not in CONVERTED:
        named = architecture or "a model without architectures in its config.json"
        return f"{named} is not converted or trained here: {_reason(architecture)}; {closest(config)}"
    if problem := _own_code(config, architecture):
        return problem
    kind = config.get("model_type")
    if (ALIASES.get(kind, kind) if isinstance(kind, str) else kind) != CONVERTED[architecture]:
        kind = config_json.show(config.get("model_type"))
        return f"model_type is {kind}, but that of {architecture} is {CONVERTED[architecture]}"
    return ""


def _own_code(config: dict[str, Any], architecture: str) -> str:
    """The reason why Megatron-Bridge refuses a release with code for its model; "" if it accepts it.

    Megatron-Bridge looks for a bridge with the name of that class, and only some bridges are registered by name.
    """
    auto_map = config.get("auto_map")
    code = str((auto_map if isinstance(auto_map, dict) else {}).get("AutoModelForCausalLM", ""))
    if not code or (architecture in BY_NAME and code.rpartition(".")[2] == architecture):
        return ""
    text = f"auto_map names {config_json.show(code)}, code of the release, but only transformers' {architecture} is"
    return f"{text} converted; if both compute the same, remove auto_map from config.json in a local folder"


def _reason(architecture: str) -> str:
    if reason := NOT_TAKEN.get(architecture):
        return reason
    if architecture.endswith("ForConditionalGeneration"):
        return MORE_THAN_TEXT
    return UNTRIED if architecture in BRIDGED else NO_BRIDGE if architecture else "its family is unknown"
