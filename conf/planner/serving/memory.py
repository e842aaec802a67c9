"""Memory of vLLM 0.26 on the fullest of the GPUs that serve a model.

    memory(model, way, gpu) -> ServedMemory

Bytes on a GPU. A weight has w bytes (bf16 2, FP8 1 and a scale for each row, a code of a packed base those of its
format), every other number B bytes:

    weights      of a pipeline stage: w * (attention + dense MLP + shared experts + experts) / tp + B * (embedding,
                 output) / tp + B * the rest. If there are fewer key-value heads than tp, they are repeated. Latent
                 attention has its down-projections on every GPU, and its up-projections twice, for decoding
    adapters     rank * (in + out) of each matrix, and of all experts / tp, even if few experts have an adapter
    activations  T * [4 H + top_k * max(2 I, H) + top_k * I] * B    T tokens of a step; vLLM measures them at the start
    sampler      rows at once * V * 12
    graphs       measured: 0.12 to 0.18 GB with 4 layers, about 2 GB with 92; none if eager
    context      CUDA's, NCCL's and cuBLAS', as in training (conf/planner/memory.py)
    cache        the rest of UTILIZATION of the GPU: keys and values of tokens,
                 layers * 2 * key-value heads / tp * head width * B each (latent: layers * (rank + rope) * B, not cut)
    prompts      T * V * (B + 8) for the log-probabilities of a prompt. vLLM does not count them, so they must fit into
                 the memory outside UTILIZATION and the freed memory of activations and sampler

The figures of weights, cache and prompts are computed as in vLLM's code; context was measured.
Not covered: data parallel serving, fp32 weights of a router, layers that vLLM fuses to more than their matrices.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from conf.model_facts import ModelFacts
from conf.planner import parameters
from conf.planner.hardware import Gpu
from conf.planner.memory import CONTEXT, NCCL_ALONE, WORKSPACE
from conf.rules import packed_base
from conf.schema.sections import Adapter

UTILIZATION = 0.9  # of a GPU; vLLM's default of 0.92 leaves too little for the prompts' log-probabilities
BLOCK = 16  # tokens of a block of the cache
FP8 = 1.001  # bytes of a weight, with an fp32 scale for each row of a matrix
MATRICES = ("attention", "mlp", "shared_experts", "experts")
GRAPHS, GRAPHS_A_LAYER = 0.1e9, 0.02e9
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters: vLLM reserves memory for the next larger one
PROMPTS = 3.2e9  # bytes of log-probabilities of prompts in a step, at most
STEP = 8192  # tokens of a step, at most


@dataclass(frozen=True)
class Way:
    """A way to serve a model."""

    tp: int
    hosts: int = 1  # stages of the pipeline
    expert_parallel: bool = False
    quantized: bool = False  # weights in FP8
    codes: packed_base.Format | None = None  # of the matrices in `packed`, as in training
    packed: tuple[str, ...] = ()  # parts of the model, as in model.pack
    eager: bool = False
    byte: int = 2  # bytes of numbers that are not quantized
    adapter: Adapter | None = None  # served next to the base
    sequences: int = 256  # computed at once
    tokens: int = 2048  # of a step

    def each(self, kind: str) -> float:
        """Bytes of a weight of this kind of matrices."""
        if self.codes and packed_base.part_of(kind) in self.packed:
            return self.codes.bytes
        return FP8 if self.quantized else self.byte


@dataclass(frozen=True)
class ServedMemory:
    """Bytes on the fullest GPU."""

    weights: int
    adapters: int
    activations: int
    sampler: int
    graphs: int
    context: int
    token: int  # of the cache, per token
    prompts: int
    capacity: int  # of the GPU

    @property
    def fixed(self) -> int:
        """Bytes that are taken before the first token."""
        return self.weights + self.adapters + self.activations + self.sampler + self.graphs + self.context

    @property
    def cache(self) -> int:
        """Bytes that are left for keys and values; below 0 nothing can be served."""
        return int(self.capacity * UTILIZATION) - self.fixed

    @property
    def cached(self) -> int:
        """Tokens that the cache holds."""
        return max(0, self.cache) // self.token // BLOCK * BLOCK

    @property
    def taken(self) -> int:
        """Bytes that nvidia-smi shows: vLLM allocates its complete cache at the start."""
        return self.fixed + max(0, self.cache)

    def lacks(self, length: int) -> int:
        """Return the bytes that are missing for a row of `length` tokens and its log-probabilities; negative = room."""
        free = self.capacity - int(self.capacity * UTILIZATION) + self.activations + self.sampler
        return max(ceil(length / BLOCK) * BLOCK * self.token - self.cache, self.prompts - free)


def tokens_of_a_step(facts: ModelFacts, byte: int, sequences: int) -> int:
    """Return the largest power of two of tokens whose log-probabilities take at most PROMPTS bytes."""
    most = min(STEP, int(PROMPTS / (facts.vocab * (byte + 8))))
    return max(1 << max(most, 1).bit_length() - 1, sequences)


def memory(facts: ModelFacts, way: Way, gpu: Gpu) -> ServedMemory:
    stages = [_stage(facts, way, place) for place in range(way.hosts)]
    weights, adapters, token = max(stages)
    width = max(2 * facts.ffn, facts.hidden) + facts.ffn
    if facts.experts:
        inner = facts.expert_ffn if way.expert_parallel else facts.expert_ffn / way.tp
        width = facts.top_k * (max(2 * inner, facts.hidden) + inner)
    groups = 1 + (way.tp > 1) + (way.hosts > 1) + way.expert_parallel
    return ServedMemory(
        weights=weights,
        adapters=adapters,
        activations=int(way.tokens * (4 * facts.hidden + width) * way.byte),
        sampler=way.sequences * facts.vocab * 12,
        graphs=0 if way.eager else int(GRAPHS + GRAPHS_A_LAYER * facts.layers / way.hosts),
        context=CONTEXT + WORKSPACE + NCCL_ALONE * groups,
        token=token,
        prompts=way.tokens * facts.vocab * (way.byte + 8),
        capacity=gpu.memory,
    )


def layers_of(stage: int, layers: int, stages: int) -> tuple[int, int]:
    """Return the first layer of a stage, and the layer after its last.

    If layers cannot be shared evenly, the stages before the last one have one layer more.
    """
    counts = [layers // stages] * stages
    for more in range(layers % stages):
        counts[-more - 2] += 1
    return sum(counts[:stage]), sum(counts[: stage + 1])


def _stage(facts: ModelFacts, way: Way, place: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of adapters, and of a token in the cache, on a GPU of a stage."""
    first, end = layers_of(place, facts.layers, way.hosts)
    kinds = Counter(facts.kinds[first:end])
    weights = sum(_layer(facts, kind, way) * count for kind, count in kinds.items())
    adapters = sum(_adapters(facts, kind, way) * count for kind, count in kinds.items())
    ends = (place == 0) + (place == way.hosts - 1 and not (facts.tied and way.hosts == 1))
    vocabulary = ceil(facts.vocab / 64 / way.tp) * 64 * facts.hidden
    weights += (ends * vocabulary + (facts.positions * facts.hidden if place == 0 else 0)) * way.byte
    cached = [facts.of(kind) for kind in facts.kinds[first:end] if facts.attends(kind)]
    return ceil(weights), adapters, max(1, sum(_cached(of_layer, way) for of_layer in cached if of_layer.keys))


def _layer(facts: ModelFacts, kind: str, way: Way) -> float:
    each, part = way.each("attention"), parameters.parts(facts, kind)
    plain = part["norms"] + part.get("router", 0)
    matrices = sum(part[name] * way.each(name) for name in MATRICES if name in part)
    if facts.routed(kind) and way.expert_parallel:  # some GPUs have one expert more if experts do not divide evenly
        matrices += part["experts"] // facts.experts * (-facts.experts % way.tp) * way.each("experts")
    if facts.kv_rank:
        whole = facts.hidden * (facts.q_rank + facts.kv_rank + facts.qk_rope) * each
        cut = whole + (matrices - whole) / way.tp
        plain += facts.kv_rank * facts.heads * (facts.qk_nope + facts.v_head) // way.tp
    else:
        own = facts.of(kind)
        keys = (own.keys + own.values) * facts.hidden * own.kv_heads * own.head_dim * each if facts.attends(kind) else 0
        cut = (matrices - keys) / way.tp + keys / min(way.tp, own.kv_heads)
    return cut + plain * way.byte


def _cached(facts: ModelFacts, way: Way) -> int:
    if facts.kv_rank:
        return (facts.kv_rank + facts.qk_rope) * way.byte
    return 2 * max(1, facts.kv_heads // way.tp) * facts.head_dim * way.byte


def _adapters(facts: ModelFacts, kind: str, way: Way) -> int:
    if way.adapter is None:
        return 0
    targets = way.adapter.names
    rank = next((size for size in RANKS if size >= way.adapter.rank), way.adapter.rank)
    sizes = 0
    for linear in parameters.linears(facts, kind):
        if linear.name in targets:
            into, out = linear.into, linear.out
            sizes += into // way.tp + out if linear.cut == "row" else into + out // way.tp
    if facts.routed(kind) and {"linear_fc1", "linear_fc2"} <= {*targets}:
        # Complete adapters of a GPU's experts, or parts of all adapters: trainer/serving/unmerged.py cuts both sides.
        matrices = 3 if facts.gated else 2
        sizes += ceil(facts.experts / way.tp) * matrices * (facts.expert_hidden + facts.expert_ffn)
    return sizes * rank * way.byte
