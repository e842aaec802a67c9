"""Obstacles to the conversion of a released model, found in its config.json before anything else is downloaded.

    obstacles(config, ignored) -> ["config.json: sliding_window is ...", ...]     a line per reason

    unwritable(config, export.quantization) -> ""        or why the merged model cannot have the release's format

Where there is none, trainer.convert checks every tensor.
"""

from collections.abc import Collection
from typing import Any

from conf.alternatives import closest
from conf.model_facts import ALIASES, CONVERTED
from conf.model_files import config_json, quantization
from conf.rules.function import unread

IGNORE = "model.ignore_config lists keys that do not matter to you"

# Families that are not supported here, and why.
DELTA_NET = "an export does not know how Megatron-Bridge lays out its gated delta net and shifts its norms"
GEMMA = (
    "Megatron-Bridge adds adapters after the norms that follow o_proj and down_proj, but merging adds them before the "
    "norms, and its windows and soft caps were compared on no GPU"
)
INDEXER = "its attention picks tokens by an indexer, whose kernels need a GPU, and it was compared on none"
NO_BRIDGE = "Megatron-Bridge 0.6 has no bridge for it"
NOT_TAKEN = {
    "Qwen3NextForCausalLM": DELTA_NET,
    "Qwen3_5ForCausalLM": DELTA_NET,
    "Qwen3_5ForConditionalGeneration": DELTA_NET,
    "Qwen3_5MoeForCausalLM": DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": DELTA_NET,
    "NemotronHForCausalLM": "an export does not know how Megatron-Bridge lays out its Mamba layers",
    "Llama4ForCausalLM": NO_BRIDGE,
    "Llama4ForConditionalGeneration": NO_BRIDGE,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": GEMMA,
    "GlmMoeDsaForCausalLM": INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": INDEXER,
}
# Others that Megatron-Bridge 0.6 converts; ForConditionalGeneration read more than text.
BRIDGED = {
    *("BailingMoeV2ForCausalLM", "DeciLMForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM"),
    *("Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    *("FalconH1ForCausalLM", "GemmaForCausalLM", "Gemma4ForCausalLM", "HYV3ForCausalLM", "KimiK2ForCausalLM"),
    *("MiMoForCausalLM", "MiMoV2FlashForCausalLM", "NemotronForCausalLM", "SarvamMLAForCausalLM"),
    *("SarvamMoEForCausalLM", "Step3p5ForCausalLM"),
}
# Families that Megatron-Bridge registers by name: their releases have code for a transformers without the family.
BY_NAME = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MiniMaxM2ForCausalLM")
UNTRIED = (
    "Megatron-Bridge 0.6 has a bridge for it, but nobody compared the trained and exported model with transformers"
)
MORE_THAN_TEXT = "it reads more than text, and models of text alone are trained here"


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
    """The reason why a model of this architecture cannot be converted here; "" where it can."""
    architecture = config_json.architecture(config)
    if architecture not in CONVERTED:
        named = architecture or "a model without architectures in its config.json"
        return f"{named} is not converted or trained here: {_reason(architecture)}; {closest(config)}"
    if own := _own_code(config, architecture):
        return own
    kind = config.get("model_type")
    if (ALIASES.get(kind, kind) if isinstance(kind, str) else kind) != CONVERTED[architecture]:
        kind = config_json.show(config.get("model_type"))
        return f"model_type is {kind}, and that of {architecture} is {CONVERTED[architecture]}"
    return ""


def _own_code(config: dict[str, Any], architecture: str) -> str:
    """The reason why Megatron-Bridge does not take a release that names code for its model; "" if it does.

    Megatron-Bridge looks for a bridge by the name of that class, and finds only bridges registered by a name.
    """
    named = config.get("auto_map")
    code = str((named if isinstance(named, dict) else {}).get("AutoModelForCausalLM", ""))
    if not code or (architecture in BY_NAME and code.rpartition(".")[2] == architecture):
        return ""
    text = f"auto_map names {config_json.show(code)}, code of the release, and only transformers' {architecture} is"
    return f"{text} converted; if both compute the same, take auto_map out of config.json in a local folder"


def _reason(architecture: str) -> str:
    if reason := NOT_TAKEN.get(architecture):
        return reason
    if architecture.endswith("ForConditionalGeneration"):
        return MORE_THAN_TEXT
    return UNTRIED if architecture in BRIDGED else NO_BRIDGE if architecture else "its family is unknown"
