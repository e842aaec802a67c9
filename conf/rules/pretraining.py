"""Rules for a model whose weights are drawn, and for the flow pretrain."""

from collections.abc import Iterator

from conf.rules import serving, shipping
from conf.schema.model import Drawn
from conf.schema.run import Run
from contract.faults import Fault

TEXTS = ("auto", "text")  # values of data.shape for texts


def is_drawn(run: Run) -> bool:
    """Whether the run begins with random weights."""
    return isinstance(run.model.source, Drawn)


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    source, tokenizer = run.model.source, run.model.tokenizer
    if not isinstance(source, Drawn):
        if tokenizer is not None:
            yield "model.tokenizer", f"{tokenizer}, but {source} has a tokenizer: the key is for drawn weights only"
        return
    if run.model.merge_adapter:
        yield "model.merge_adapter", "has no meaning for drawn weights"
    if tokenizer is None and isinstance(source.config, dict):
        yield "model.tokenizer", "required with the keys of a config.json: a Hub id, a folder or s3://..."
    if run.adapter.kind != "none":
        yield "adapter.kind", f"{run.adapter.kind}, but drawn weights have to be trained themselves; none"
    rounded = serving.rounding(run) or (run.export.quantization if shipping.is_served(run) else None)
    if rounded:
        key = "evaluate" if run.evaluate.quantization else "export"
        yield f"{key}.quantization", f"{rounded} is compared with the base's answers, which drawn weights lack; null"


def require(run: Run) -> None:
    """Refuse a run that is not a pretraining."""
    if run.adapter.kind != "none":
        raise Fault(f"adapter.kind: {run.adapter.kind}, but pretraining trains every weight; adapter.kind=none")
    if run.reinforce.steps:
        raise Fault(f"reinforce.steps: {run.reinforce.steps}, but only flows.finetune has reinforcement learning; 0")
    if "held_out" in run.evaluate.tasks and run.promote.metric == "held_out/exact_match":
        raise Fault(f"promote.metric: {run.promote.metric}, but texts have no answers; held_out/perplexity")
    for number, part in enumerate(run.data.parts):
        key = f"data.mixture[{number}].shape" if run.data.mixture else "data.shape"
        if part.shape not in TEXTS:
            raise Fault(f"{key}: {part.shape}, but pretraining reads texts or .bin/.idx; flows.finetune reads answers")
