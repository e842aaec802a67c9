"""Reasons why vLLM 0.26 cannot serve a model, as its config.json and the run say beforehand.

    unservable(run, facts, cpu) -> ["head_dim is 24, and ...", ...]      a line per reason; none: it probably can

The check runs before anything is downloaded: a model that nothing serves would be trained to the end, unevaluated. vLLM
has a kernel for any size of heads on a GPU, and for CPU_HEADS on a CPU. tests/conf/rules/test_serving.py compares the
tables with the vLLM that is installed. Not covered: memory, and the needs of families other than these.
"""

from collections.abc import Iterator

from conf.model_facts import ModelFacts
from conf.schema.run import Run

SERVED = (
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2ForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
)
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def unservable(run: Run, facts: ModelFacts, cpu: bool) -> list[str]:
    if facts.architecture not in SERVED:
        return [f"architectures is {facts.architecture}, and vLLM is known to serve {', '.join(SERVED)}"]
    return list(_on_cpu(facts) if cpu else _over(run.evaluate.gpus or 1, facts))


def _on_cpu(facts: ModelFacts) -> Iterator[str]:
    if facts.kv_rank:
        yield "kv_lora_rank: vLLM does no latent attention on a CPU"
    elif facts.head_dim not in CPU_HEADS:
        sizes = ", ".join(map(str, CPU_HEADS))
        yield f"head_dim is {facts.head_dim}, and on a CPU vLLM serves heads of {sizes}"


def _over(gpus: int, facts: ModelFacts) -> Iterator[str]:
    """Check that the model can be cut over the GPUs that are asked for. Nothing here knows the GPUs of the host."""
    widths = {
        "num_attention_heads": facts.heads,
        "intermediate_size": facts.ffn,
        "moe_intermediate_size": facts.expert_ffn,
        "the width of shared experts": facts.shared_ffn,
    }
    for name, width in widths.items():
        if width % gpus:
            yield f"evaluate.gpus is {gpus}, which does not divide {name}, {width}"
    if facts.kv_heads % gpus and gpus % facts.kv_heads:
        yield f"evaluate.gpus is {gpus}, neither divisor nor multiple of num_key_value_heads, {facts.kv_heads}"
