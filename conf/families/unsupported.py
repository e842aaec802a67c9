"""Families that are not supported, and the reason why."""

DELTA_NET = "an export does not know how Megatron-Bridge lays out its gated delta net and shifts its norms"
GEMMA = (
    "Megatron-Bridge adds adapters after the norms that follow o_proj and down_proj, but merging adds them before the "
    "norms, and its windows and soft caps were compared on no GPU"
)
INDEXER = "its attention picks tokens by an indexer, whose kernels need a GPU, and it was compared on none"
NO_BRIDGE = "Megatron-Bridge 0.6 has no bridge for it"
UNTRIED = (
    "Megatron-Bridge 0.6 has a bridge for it, but nobody compared the trained and exported model with transformers"
)
MORE_THAN_TEXT = "it reads more than text, and models of text alone are trained here"
REFUSED = {
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


def reason(architecture: str) -> str:
    """The reason why a model of this architecture is not converted or trained here."""
    if known := REFUSED.get(architecture):
        return known
    if architecture.endswith("ForConditionalGeneration"):
        return MORE_THAN_TEXT
    return UNTRIED if architecture in BRIDGED else NO_BRIDGE if architecture else "its family is unknown"
