"""Losses and gradients of a run whose frozen experts are one product, or Transformer Engine's. See its test."""

import json
from pathlib import Path

from conf.schema.run import Run
from tests.support.ranks import gradients_of_run


def main(run: Run) -> None:
    """Train on forked ranks, with what request.json asks for, and keep all in gradients.pt."""
    folder = Path(run.paths.output)
    request = json.loads((folder / "request.json").read_text())
    gradients_of_run.start(run)
    import torch

    from trainer.megatron import frozen_experts
    from trainer.patches.expert_adapters import ExpertAdapter
    from trainer.weights.packed_base import loading

    counts = {"products": 0, "dispatched": 0, "asked": 0}

    def counted(owner, name: str, key: str) -> None:
        original = getattr(owner, name)

        def call(*given, **named):
            counts[key] += 1
            return original(*given, **named)

        setattr(owner, name, call)

    def gradients_of(chunks: list) -> list:
        named = [pair for chunk in chunks for pair in chunk.named_parameters() if pair[1].requires_grad]
        return [(name, parameter.main_grad.detach().float().clone()) for name, parameter in named]

    gradients_of_run._gradients = gradients_of
    frozen_experts.has_kernel, frozen_experts.OF_TYPE = lambda: request["frozen"], torch.float32
    ExpertAdapter._can_use_grouped_mm = lambda *_: request["frozen"]  # as on a GPU
    counted(frozen_experts.Product, "forward", "products")
    counted(frozen_experts.OneRank, "dispatch_postprocess", "dispatched")
    if run.model.base != "bf16":
        loading.prepare(run)
    losses, _, pieces, _ = gradients_of_run.train(run, ())
    if torch.distributed.get_rank() == 0:
        torch.save({"losses": losses, "gradients": dict(pieces), "counts": counts}, folder / "gradients.pt")
