"""Released tensors of one model, made by Megatron-Bridge and by recipes, before and after every weight has changed.

Writes answer.json: how many tensors are views, are merged, are made step by step; which differ; and why it gave up.
"""

import json
from pathlib import Path

import torch

from benchmarks import logits
from conf.schema.run import Run
from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.export import Export
from trainer.reinforcement.transfer.repeated import recipes


def main(run: Run) -> None:
    from trainer.megatron.recipe import make_adapter

    bridge, _, model = logits.built(run)
    if adapter := make_adapter(run):
        model = adapter(model, training=True)
    change(model, 0)
    export, different = Export(bridge, model), set[str]()
    buckets = [one.metas for one in wire.buckets(export.tensors(), torch.ByteTensor, 1 << 16)]
    for seed in (1, 2):
        change(model, seed)
        wanted = {name: tensor.clone() for name, tensor in export.tensors()}
        for filling in export.fillings(buckets) or ():
            memory = torch.zeros(wire.used(filling.metas), dtype=torch.uint8)
            filling.fill(memory)
            made = {one.name: wire.part(memory, one, place) for one, place in wire.placed(filling.metas)}
            different |= {name for name, tensor in made.items() if not torch.equal(tensor, wanted[name])}
    kinds = [kind(one) for one in export._recipes.values()]
    answer = {"tensors": sum(map(len, buckets)), "different": sorted(different)}
    answer |= {one: kinds.count(one) for one in ("view", "merged", "steps")}
    model[0].register_buffer("new", torch.zeros(3))  # which no tensor is made of
    answer |= {"unchanged": export.is_known()}
    for parameter in model[0].parameters():
        parameter.data = parameter.data.clone()
    answer |= {"moved": not export.is_known()}
    (Path(run.paths.output) / "answer.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()


def kind(recipe: recipes.Recipe) -> str:
    return "view" if isinstance(recipe, torch.Tensor) else "merged" if recipes.merges(recipe) else "steps"


def change(model: list[torch.nn.Module], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model[0].parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
