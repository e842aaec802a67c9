"""Released tensors of one model, made by Megatron-Bridge and by recipes, before and after every weight has changed.

Writes answer.json: how many tensors are views, are merged, are made step by step; which differ; and why it gave up.
"""

import json
from pathlib import Path

import torch

from conf.schema.run import Run
from trainer.rehearsal import logits
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.export import Export
from trainer.reinforcement.transfer.repeated import recipes


def main(run: Run) -> None:
    from trainer.megatron.recipe import make_adapter

    bridge, _, model = logits.built(run)
    if adapter := make_adapter(run):
        model = adapter(model, training=True)
    change(model, 1)
    export, different = Export(bridge, model), set[str]()
    buckets = [one.metas for one in wire.buckets(export.tensors(), torch.ByteTensor, 1 << 16)]
    for seed in (1, 2):
        change(model, seed)
        for filling in export.fillings(buckets) or ():
            memory = torch.zeros(wire.places([one.bytes for one in filling.metas])[-1], dtype=torch.uint8)
            filling.fill(memory)
            for one, place in zip(filling.metas, wire.places([one.bytes for one in filling.metas]), strict=False):
                wanted = right[one.name] if (right := exported(export)) else None
                if wanted is None or not torch.equal(wire.part(memory, one, place), wanted):
                    different.add(one.name)
    found = list(export._noted.values())
    kinds = [
        "view" if isinstance(one, torch.Tensor) else "merged" if recipes.as_merged(one) else "steps" for one in found
    ]
    model[0].register_buffer("new", torch.zeros(3))
    answer = {
        "tensors": sum(map(len, buckets)),
        "different": sorted(different),
        "moved": export.fillings(buckets) is None,
    }
    answer |= {kind: kinds.count(kind) for kind in ("view", "merged", "steps")}
    (Path(run.paths.output) / "answer.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()


kept: dict[int, dict[str, torch.Tensor]] = {}
version = [0]


def exported(export: Export) -> dict[str, torch.Tensor]:
    """What Bridge exports of the weights as they are."""
    if version[0] not in kept:
        kept[version[0]] = {name: tensor.clone() for name, tensor in export.tensors()}
    return kept[version[0]]


def change(model: list[torch.nn.Module], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model[0].parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    version[0] += 1
