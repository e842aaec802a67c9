"""Reasons why vLLM 0.26 cannot serve a model, by its config.json and the run.

    unservable(run, facts, cpu) -> ["head_dim is 24, and ...", ...]      a line per reason; empty: it probably can
    rounding(run)                                                       format that weights are rounded to, or None
    is_apart(run)                                                       whether served and trained weights differ
    may_be_apart(run)                                                   the same for any export.merge_onto
    contradictions(run)                                                 (key, problem), for contradictions.py
    precision(run)                                                      precision of an evaluation

The check runs before anything is downloaded. Otherwise a model that cannot be served would be trained completely, and
then not evaluated. On a GPU vLLM has kernels for all sizes of heads, except latent attention: only LATENT_HEADS. On a
CPU it has CPU_HEADS. Limits of a family are in conf/families/. tests/conf/rules/test_serving.py compares the tables
with the installed vLLM. conf/planner/serving/ has the memory.
"""

from collections.abc import Iterator

from conf import families
from conf.model_facts import ModelFacts
from conf.rules import packed_base, shipping
from conf.schema.run import Run

FP8 = 8.9  # CUDA's compute capability that quantization needs
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a weight, by precision
LATENT = "kv_b_proj"  # Hugging Face's name of linear_kv_up_proj
LATENT_HEADS = ((128, 64, 128), (192, 64, 256), (64, 64, 128))  # qk_nope_head_dim, qk_rope_head_dim, v_head_dim
MARLIN, TILE = 128, 64  # vLLM's kernel for experts in 4 bits needs these multiples of the hidden size and of the width
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def precision(run: Run) -> str:
    """Precision that an evaluation computes in: that of training, unless evaluate.precision is set."""
    return run.evaluate.precision or run.train.precision


def rounding(run: Run) -> str | None:
    """Format that weights are rounded to for serving, base and tuned alike: fp8, the release's own, or none."""
    own = run.evaluate.adapter == "merged" and run.export.quantization == "as_released"
    return run.evaluate.quantization or ("as_released" if own else None)


def is_apart(run: Run) -> bool:
    """Whether served and trained weights differ by rounding; the served base then shows how much that matters."""
    return may_be_apart(run) and not (rounding(run) is None and packed_base.merges_onto(run))


def may_be_apart(run: Run) -> bool:
    """Whether they differ with any value of export.merge_onto: the base is evaluated once for all values."""
    return rounding(run) is not None or packed_base.format_of(run) is not None or shipping.is_served(run)


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    evaluate, kind = run.evaluate, run.adapter.kind
    if evaluate.quantization and precision(run) != "bf16":
        yield "evaluate.quantization", f"{evaluate.quantization} needs weights in bf16; evaluate.precision=bf16"
    if evaluate.quantization and run.export.quantization:
        yield "evaluate.quantization", f"{evaluate.quantization}, but export.quantization rounds weights already; null"
    if evaluate.adapter == "merged":
        return
    if packed_base.is_served(run) and precision(run) != "bf16":
        yield "evaluate.adapter", f"packed, but evaluate.precision is {precision(run)}, and codes need bf16"
    if packed_base.is_served(run) and evaluate.quantization:
        yield "evaluate.quantization", f"{evaluate.quantization}, but evaluate.adapter packed serves codes; null"
    if kind != "lora":
        why = "there is no adapter" if kind == "none" else next(unadded(dora=True))
        yield "evaluate.adapter", f"{evaluate.adapter}, but adapter.kind is {kind}: {why}; merged"
    elif "adapter" not in (run.export.formats or ("adapter",)):
        yield "evaluate.adapter", f"{evaluate.adapter}, but export.formats lacks adapter"


def _packed(run: Run, facts: ModelFacts, serving: families.Serving, cpu: bool) -> Iterator[str]:
    """Yield reasons why vLLM cannot compute with the codes of the packed base, or of the export."""
    if packed_base.is_served(run):
        form, packed = run.model.base, packed_base.parts(run)
        key, other = f"evaluate.adapter is packed with model.base {form}", "merged or unmerged serves it"
    elif shipping.is_served(run):
        form, packed = run.export.quantization or "", packed_base.PARTS
        key, other = f"export.quantization is {form}", "evaluate.tasks=[] evaluates nothing"
        if precision(run) != "bf16":
            yield f"{key}, which needs bf16 (evaluate.precision); {other}"
    else:
        return
    (height, width), gpus = packed_base.FORMATS[form].block, run.evaluate.gpus or 1
    if not serving.packed:
        yield f"{key}, and its packed matrices were not compared with vLLM's for {facts.architecture}; {other}"
    if cpu and (form != "int4" or facts.experts):
        yield f"{key}, and on a CPU vLLM computes only int4, without experts; {other}"
    ways = {"experts": 1 if run.evaluate.expert_parallel else gpus}
    heads = facts.heads * (facts.v_head if facts.kv_rank else facts.head_dim)
    sizes = [("attention", heads), ("experts", facts.expert_ffn)]
    for part, size in [*sizes, ("dense", facts.ffn), ("dense", facts.shared_ffn)]:
        share = size // ways.get(part, gpus)
        unit = TILE if part == "experts" and form in ("nvfp4", "mxfp4") else width
        if part in packed and share % unit:
            remedy = other if size % unit else "other evaluate.gpus"
            yield f"{key}, and the part of a GPU of {part} is {share} wide, not a multiple of {unit}; {remedy}"
    if packed_base.is_served(run) and form == "nvfp4" and "attention" in packed and (facts.kv_rank or facts.delta):
        joined = "q_a_proj and kv_a_proj" if facts.kv_rank else "the sections of in_proj"
        yield f"{key}, and vLLM joins {joined}, which have several factors; model.pack without attention"
    if "experts" in packed and facts.experts and facts.hidden % MARLIN and form != "fp8":
        yield f"{key}, and for experts the hidden size, {facts.hidden}, must be a multiple of {MARLIN}; {other}"
    if height > 1 and "attention" in packed and not facts.kv_rank and facts.head_dim % height:
        yield f"{key}, and rows of {height} share a scale, but a head has {facts.head_dim}; int4"


def unservable(run: Run, facts: ModelFacts, cpu: bool) -> list[str]:
    family, evaluate = families.named(facts.architecture), run.evaluate
    if family.serving is None:
        served = sorted({other.architecture for other in families.every().values() if other.serving})
        return [f"architectures is {facts.architecture}, but vLLM is known to serve only {', '.join(served)}"]
    found = [family.serving.on_cpu] if cpu and family.serving.on_cpu else []
    found += _on_cpu(run, facts) if cpu else _on_gpu(run, facts)
    if evaluate.expert_parallel and not facts.experts:
        found.append("evaluate.expert_parallel is true, and the model has no experts")
    if (evaluate.nodes or 1) > facts.layers:
        found.append(f"evaluate.nodes is {evaluate.nodes}, more than the model's {facts.layers} layers")
    if rounding(run) == "as_released" and (cpu or precision(run) != "bf16"):
        needs = "a GPU and bf16" if cpu else "bf16 (evaluate.precision)"
        found.append(f"export.quantization is as_released, which needs {needs}; evaluate.tasks=[] evaluates nothing")
    return [*found, *_unmerged(run, facts, family.serving, cpu), *_packed(run, facts, family.serving, cpu)]


def _unmerged(run: Run, facts: ModelFacts, serving: families.Serving, cpu: bool) -> Iterator[str]:
    """Yield reasons why the run's adapter cannot be served next to the base."""
    if run.evaluate.adapter == "merged":
        return
    merged = "evaluate.adapter=merged serves it"
    latent = facts.kv_rank > 0 and "linear_kv_up_proj" in run.adapter.names
    for reason in unadded(latent=latent, experts=facts.experts > 0, cpu=cpu):
        yield f"{reason}; {merged}" + ", or train it without linear_kv_up_proj" * latent
    experts = [name for name in ("linear_fc1", "linear_fc2") if name in run.adapter.names]
    if serving.expert_adapters and not cpu and experts:
        yield f"{serving.expert_adapters}; {merged}"
    elif facts.experts and not cpu and len(experts) == 1:
        yield f"vLLM takes adapters of both linear_fc1 and linear_fc2, but not of {experts[0]} only; {merged}"


def unadded(*, dora: bool = False, latent: bool = False, experts: bool = False, cpu: bool = False) -> Iterator[str]:
    """Yield reasons why vLLM cannot apply an adapter to the base that it serves, or would silently ignore it."""
    if dora:
        yield "vLLM adds products, and DoRA scales the weight"
    if latent:  # for decoding, vLLM takes both halves of kv_b_proj from the base's weight when it loads it
        yield f"vLLM would leave the adapter of {LATENT} (linear_kv_up_proj) out of answers"
    if experts and cpu:
        yield "vLLM adds no adapter to a model with experts on a CPU, and needs a GPU for it"


def _on_cpu(run: Run, facts: ModelFacts) -> Iterator[str]:
    if facts.sinks and precision(run) != "bf16":
        yield f"on a CPU vLLM's attention takes sinks only in bf16, and evaluate.precision is {precision(run)}"
    if run.evaluate.quantization:
        yield f"evaluate.quantization is {run.evaluate.quantization}, which needs a GPU; null"
    if facts.kv_rank:
        yield "kv_lora_rank: vLLM does no latent attention on a CPU"
    elif facts.head_dim not in CPU_HEADS:
        sizes = ", ".join(map(str, CPU_HEADS))
        yield f"head_dim is {facts.head_dim}, and on a CPU vLLM serves heads of {sizes}"


def _on_gpu(run: Run, facts: ModelFacts) -> Iterator[str]:
    yield from uncut(facts, run.evaluate.gpus or 1, bool(run.evaluate.expert_parallel))
    heads = (facts.qk_nope, facts.qk_rope, facts.v_head)
    if facts.kv_rank and heads not in LATENT_HEADS:
        known = " or ".join("{}, {} and {}".format(*sizes) for sizes in LATENT_HEADS)
        names = "qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
        yield f"{names} are {heads[0]}, {heads[1]} and {heads[2]}, and vLLM's latent attention is of {known}"


def has_whole_experts(facts: ModelFacts, gpus: int) -> bool:
    """Whether each GPU must have whole experts: experts cannot be cut over the GPUs, but shared evenly."""
    return facts.experts > 0 and facts.expert_ffn % gpus > 0 and facts.experts % gpus == 0


def uncut(facts: ModelFacts, gpus: int, expert_parallel: bool = False, key: str = "evaluate.gpus") -> Iterator[str]:
    """Yield reasons why the model cannot be cut over this number of GPUs, the value of `key`."""
    widths = {
        "num_attention_heads": facts.heads,
        "intermediate_size": facts.ffn,
        "moe_intermediate_size": 0 if expert_parallel else facts.expert_ffn,
        "the width of shared experts": facts.shared_ffn,
    }
    for name, width in widths.items():
        if width % gpus:
            yield f"{key} is {gpus}, which does not divide {name}, {width}"
    if facts.kv_heads % gpus and gpus % facts.kv_heads:
        yield f"{key} is {gpus}, neither divisor nor multiple of num_key_value_heads, {facts.kv_heads}"
