"""Layout of vLLM for an evaluation: how many hosts and GPUs, with which room for the cache, and why none would do.

    choose(run, facts, gpu) -> Serving      on hosts of the run
    of(run, facts, gpu, tp, hosts)          of so many GPUs on each of so many hosts
    refusal(run, facts, gpu)                why none fits on hosts of the run, with keys that help; or ""
    with_layout(run, chosen) -> Run         the run with the chosen layout, for the stages

If one host can hold the model, the layout has the fewest GPUs whose cache holds all questions at once, or those that
hold the most. On several hosts each host is a stage of the pipeline, with all of its GPUs that divide the model. Values
of evaluate.nodes, gpus, expert_parallel and eager are kept. Quantization changes answers: it is advised, never chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from conf.model_facts import ModelFacts
from conf.planner.hardware import GB, Gpu
from conf.planner.serving.memory import ServedMemory, Way, memory, tokens_of_a_step
from conf.rules import serving
from conf.schema.run import Run
from conf.schema.sections import Evaluate

SEQUENCES = 256  # that vLLM computes at once; more than that gains nothing
FEW_SHOT = 4096  # tokens of prompt and answer that lm-eval's own tasks may take
WORTH_GRAPHS = 2000  # steps of decoding; a graph saves 5 to 15 ms of each, and takes 34 s at the start
HOSTS = 16  # most that are looked at


@dataclass(frozen=True)
class Serving:
    way: Way
    row: int  # tokens of the longest prompt and its answer
    memory: ServedMemory

    @property
    def length(self) -> int:
        """Longest sequence that vLLM is asked to take."""
        return power_of_two(self.row)

    @property
    def lacks(self) -> int:
        return self.memory.lacks(self.length)

    @property
    def at_once(self) -> int:
        """Rows that the cache holds, of those that are computed at once."""
        return min(self.way.sequences, self.memory.cached // self.row)


def choose(run: Run, facts: ModelFacts, gpu: Gpu) -> Serving:
    """The best layout on hosts of the run; where none fits, the one that lacks least."""
    hosts = [run.evaluate.nodes] if run.evaluate.nodes else range(1, min(run.layout.nodes, facts.layers, HOSTS) + 1)
    found = []
    for count in hosts:
        found.append(_on(run, facts, gpu, run.layout.gpus_per_node, count))
        if found[-1].lacks <= 0:
            return found[-1]
    return min(found, key=lambda one: one.lacks)


def _on(run: Run, facts: ModelFacts, gpu: Gpu, gpus: int, hosts: int) -> Serving:
    able = [tp for tp in range(1, gpus + 1) if not any(serving.uncut(facts, tp, spreads_experts(run, facts, tp)))]
    able = [run.evaluate.gpus] if run.evaluate.gpus else able if hosts == 1 else able[-1:]
    found = [of(run, facts, gpu, tp, hosts) for tp in able or [1]]
    wanted = rows_together(run.evaluate)
    fitting = [one for one in found if one.lacks <= 0]
    if not fitting:
        return min(found, key=lambda one: one.lacks)
    return next((one for one in fitting if one.at_once >= wanted), max(fitting, key=lambda one: one.at_once))


def of(run: Run, facts: ModelFacts, gpu: Gpu, tp: int, hosts: int = 1) -> Serving:
    """The layout of so many GPUs on each of so many hosts."""
    evaluate = run.evaluate
    byte, sequences = serving.BYTES[serving.precision(run)], rows_together(evaluate)
    way = Way(
        tp=tp,
        hosts=hosts,
        expert_parallel=spreads_experts(run, facts, tp),
        quantized=serving.rounding(run) is not None,
        byte=byte,
        adapter=run.adapter if evaluate.adapter == "unmerged" else None,
        sequences=sequences,
        tokens=tokens_of_a_step(facts, byte, sequences),
    )
    found = Serving(way, row(run), memory(facts, way, gpu))
    if not is_eager(evaluate, found.at_once):
        return found
    way = replace(way, eager=True)
    return Serving(way, row(run), memory(facts, way, gpu))


def row(run: Run) -> int:
    """Tokens of the longest prompt and its answer."""
    needed = run.data.seq_length + run.evaluate.max_tokens
    return max(needed, FEW_SHOT) if {*run.evaluate.tasks} - {"held_out"} else needed


def power_of_two(tokens: int) -> int:
    """The next power of two. vLLM finds compiled code by the longest sequence, so few lengths save compiling."""
    return 1 << (tokens - 1).bit_length()


def rows_together(evaluate: Evaluate) -> int:
    """Rows that vLLM computes at once, where its cache holds them."""
    return min(SEQUENCES, evaluate.rows or SEQUENCES)


def is_eager(evaluate: Evaluate, at_once: int) -> bool:
    """Whether vLLM neither compiles nor captures graphs: they gain nothing where few tokens are asked for."""
    if evaluate.eager is not None or evaluate.rows is None:
        return bool(evaluate.eager)
    return ceil(evaluate.rows / max(at_once, 1)) * evaluate.max_tokens < WORTH_GRAPHS


def spreads_experts(run: Run, facts: ModelFacts, tp: int) -> bool:
    """Whether a GPU has whole experts: as configured, or if they cannot be cut but divide evenly."""
    if run.evaluate.expert_parallel is not None:
        return run.evaluate.expert_parallel and tp > 1
    return serving.has_whole_experts(facts, tp)


def with_layout(run: Run, chosen: Serving) -> Run:
    """The run with the layout of its evaluation written down."""
    way = chosen.way
    keys = {"nodes": way.hosts, "gpus": way.tp, "expert_parallel": way.expert_parallel, "eager": way.eager}
    return run.changed(evaluate=keys)


def unsupported(run: Run, gpu: Gpu) -> list[str]:
    """Lines for settings of the evaluation that this kind of GPU cannot do."""
    if serving.rounding(run) and gpu.cuda and gpu.capability < serving.FP8:
        key = "evaluate.quantization" if run.evaluate.quantization else "export.quantization"
        return [f"{key} is {serving.rounding(run)}, which {gpu.name} does not compute; null"]
    return []


def refusal(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """The reason why vLLM cannot serve the model on hosts of the run, and what can; "" if it can."""
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
    """Overrides with which hosts of the run serve the model: those that answer as it does now come first."""
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
    """How many hosts would do."""
    for nodes in range(2, min(HOSTS, facts.layers) + 1):
        tried = run.changed(evaluate={"nodes": nodes, "gpus": None}, layout={"gpus_per_node": gpu.per_host})
        found = choose(tried, facts, gpu)
        if found.lacks <= 0:
            return f"It takes {nodes} hosts of {found.way.tp}: {found.memory.weights / GB:.1f} GB of weights a GPU"
    return f"Nor do {HOSTS} hosts of {gpu.per_host} hold it"
