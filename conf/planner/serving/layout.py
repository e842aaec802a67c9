"""Layout of vLLM for an evaluation: hosts, GPUs and the room for the cache, or the reason why no layout fits.

    choose(run, facts, gpu) -> Serving      the best layout on hosts of the run
    of(run, facts, gpu, tp, hosts)          the layout with tp GPUs on each of these hosts
    refusal(run, facts, gpu)                why no layout fits on hosts of the run, with keys that help; or ""
    with_layout(run, chosen) -> Run         the run with the chosen layout, for the stages

If one host can hold the model, the layout has the fewest GPUs whose cache holds all questions at once, or else the GPUs
whose cache holds most. With several hosts each host is a stage of the pipeline, with the largest number of its
GPUs that divides the model. Values of evaluate.nodes, gpus, expert_parallel and eager are kept. Quantization changes
answers, so it is only suggested, never chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from conf.model_facts import ModelFacts
from conf.planner.hardware import GB, Gpu
from conf.planner.serving.memory import ServedMemory, Way, memory, tokens_of_a_step
from conf.rules import packed_base, serving, shipping
from conf.schema.run import Run
from conf.schema.sections import Evaluate

SEQUENCES = 256  # sequences that vLLM computes at once; more bring no gain
FEW_SHOT = 4096  # tokens of prompt and answer in lm-eval's tasks, at most
WORTH_GRAPHS = 2000  # steps of decoding; a graph saves 5 to 15 ms of each, and takes 34 s at the start
HOSTS = 16  # most hosts that are tried
BLACKWELL = 10.0  # CUDA's compute capability; vLLM then computes MXFP4 with activations in 4 bits


@dataclass(frozen=True)
class Serving:
    way: Way
    row: int  # tokens of the longest prompt and its answer
    memory: ServedMemory

    @property
    def length(self) -> int:
        """Longest sequence that vLLM must accept."""
        return power_of_two(self.row)

    @property
    def lacks(self) -> int:
        return self.memory.lacks(self.length)

    @property
    def at_once(self) -> int:
        """Rows that are computed at once and fit into the cache."""
        return min(self.way.sequences, self.memory.cached // self.row)


def choose(run: Run, facts: ModelFacts, gpu: Gpu) -> Serving:
    """Return the best layout on hosts of the run; if no layout fits, the layout that lacks least."""
    hosts = [run.evaluate.nodes] if run.evaluate.nodes else range(1, min(run.layout.nodes, facts.layers, HOSTS) + 1)
    layouts = []
    for count in hosts:
        layouts.append(_on(run, facts, gpu, run.layout.gpus_per_node, count))
        if layouts[-1].lacks <= 0:
            return layouts[-1]
    return min(layouts, key=lambda layout: layout.lacks)


def _on(run: Run, facts: ModelFacts, gpu: Gpu, gpus: int, hosts: int) -> Serving:
    degrees = [tp for tp in range(1, gpus + 1) if not any(serving.uncut(facts, tp, spreads_experts(run, facts, tp)))]
    degrees = [run.evaluate.gpus] if run.evaluate.gpus else degrees if hosts == 1 else degrees[-1:]
    layouts = [of(run, facts, gpu, tp, hosts) for tp in degrees or [1]]
    rows = rows_together(run.evaluate)
    fitting = [layout for layout in layouts if layout.lacks <= 0]
    if not fitting:
        return min(layouts, key=lambda layout: layout.lacks)
    return next((layout for layout in fitting if layout.at_once >= rows), max(fitting, key=lambda other: other.at_once))


def of(run: Run, facts: ModelFacts, gpu: Gpu, tp: int, hosts: int = 1) -> Serving:
    """Return the layout with `tp` GPUs on each of `hosts` hosts."""
    evaluate = run.evaluate
    byte, sequences = serving.BYTES[serving.precision(run)], rows_together(evaluate)
    way = Way(
        tp=tp,
        hosts=hosts,
        expert_parallel=spreads_experts(run, facts, tp),
        quantized=serving.rounding(run) is not None,
        codes=packed_base.format_of(run) if packed_base.is_served(run) else None,
        packed=packed_base.parts(run),
        byte=byte,
        adapter=None if evaluate.adapter == "merged" else run.adapter,
        sequences=sequences,
        tokens=tokens_of_a_step(facts, byte, sequences),
        eager=is_eager(evaluate),
    )
    return Serving(way, row(run), memory(facts, way, gpu))


def row(run: Run) -> int:
    """Return the tokens of the longest prompt and its answer."""
    needed = run.data.seq_length + run.evaluate.max_tokens
    return max(needed, FEW_SHOT) if {*run.evaluate.tasks} - {"held_out"} else needed


def power_of_two(tokens: int) -> int:
    """Return the next power of two. vLLM finds compiled code by the longest sequence, so few lengths save compiling."""
    return 1 << (tokens - 1).bit_length()


def rows_together(evaluate: Evaluate) -> int:
    """Return the rows that vLLM computes at once, if its cache holds them."""
    return min(SEQUENCES, evaluate.rows or SEQUENCES)


def is_eager(evaluate: Evaluate) -> bool:
    """Whether vLLM skips compiling and graphs, which bring no gain for few tokens.

    The cache is taken to hold all rows that are computed together. How many it holds is not known before the data are
    read: a row can have data.seq_length tokens, but a packed one has far fewer.
    """
    if evaluate.eager is not None or evaluate.rows is None:
        return bool(evaluate.eager)
    return ceil(evaluate.rows / rows_together(evaluate)) * evaluate.max_tokens < WORTH_GRAPHS


def spreads_experts(run: Run, facts: ModelFacts, tp: int) -> bool:
    """Whether each GPU has whole experts: as configured, or if experts cannot be cut but can be shared evenly."""
    if run.evaluate.expert_parallel is not None:
        return run.evaluate.expert_parallel and tp > 1
    return serving.has_whole_experts(facts, tp)


def with_layout(run: Run, chosen: Serving) -> Run:
    """Return the run with the chosen layout in its keys of evaluation."""
    way = chosen.way
    keys = {"nodes": way.hosts, "gpus": way.tp, "expert_parallel": way.expert_parallel, "eager": way.eager}
    return run.changed(evaluate=keys)


def unsupported(run: Run, gpu: Gpu) -> list[str]:
    """Return lines for settings of the evaluation that this GPU does not support."""
    if serving.rounding(run) and gpu.cuda and gpu.capability < serving.FP8:
        key = "evaluate.quantization" if run.evaluate.quantization else "export.quantization"
        return [f"{key} is {serving.rounding(run)}, which {gpu.name} does not support; null"]
    if packed_base.is_served(run) and run.model.base == "mxfp4" and gpu.capability >= BLACKWELL:
        return [f"evaluate.adapter is packed, and on {gpu.name} vLLM rounds activations too; merged"]
    if shipping.is_served(run) and run.export.quantization == "mxfp4" and gpu.capability >= BLACKWELL:
        return [f"export.quantization is mxfp4, and on {gpu.name} vLLM rounds activations too; nvfp4"]
    return []


def refusal(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """Return the reason why vLLM cannot serve the model on hosts of the run, with keys that help; "" if it can."""
    here = choose(run, facts, gpu)
    if here.lacks <= 0:
        return ""
    taken = (here.memory.fixed + here.length * here.memory.token) / GB
    hosts = f"{here.way.hosts} x {here.way.tp}" if here.way.hosts > 1 else f"{here.way.tp}"
    why = f"{taken:.1f} GB on each of {hosts} {gpu.name}, {here.memory.weights / GB:.1f} of them weights, "
    why += f"and {here.lacks / GB:.1f} GB are missing"
    mends = [*_mends(run, facts, gpu)]
    return f"{why}. {f'These fit: {", or ".join(mends)}' if mends else _nothing(run, facts, gpu)}"


def _mends(run: Run, facts: ModelFacts, gpu: Gpu) -> Iterator[str]:
    """Yield overrides with which hosts of the run can serve the model. Those with unchanged answers come first."""
    evaluate = run.evaluate
    able = gpu.capability >= serving.FP8 and serving.precision(run) == "bf16"
    ways: list[dict[str, int | None]] = [{}, {"gpus": None}, {"nodes": None}, {"nodes": None, "gpus": None}]
    if not any(serving.uncut(facts, gpu.per_host)):
        ways.append({"nodes": 1, "gpus": gpu.per_host})
    for quantization in dict.fromkeys((evaluate.quantization, "fp8" if able else None)):
        for way in ways:
            changes = {**way, "quantization": quantization}
            changes = {key: value for key, value in changes.items() if value != getattr(evaluate, key)}
            tried = run.changed(evaluate=changes)
            if changes and choose(tried, facts, gpu).lacks <= 0:
                yield " ".join(f"evaluate.{key}={'null' if value is None else value}" for key, value in changes.items())
                break


def _nothing(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """Return a sentence on the number of hosts that would be enough."""
    for nodes in range(2, min(HOSTS, facts.layers) + 1):
        tried = run.changed(evaluate={"nodes": nodes, "gpus": None}, layout={"gpus_per_node": gpu.per_host})
        found = choose(tried, facts, gpu)
        if found.lacks <= 0:
            return f"It takes {nodes} hosts of {found.way.tp}: {found.memory.weights / GB:.1f} GB of weights a GPU"
    return f"{HOSTS} hosts of {gpu.per_host} are not enough either"
