"""Logits of Megatron's model. See conftest.megatron_logits, which writes request.json.

With `checkpoint` it is that checkpoint's model: the adapter on top of the base, or all weights where run.adapter.kind
is none. With `invent`, the adapter gets random values and is saved there as training would save it. The weights that
Megatron-Bridge would export go into the same file as the logits. With `released`, that folder's weights are those of
the model in run.paths.model, without an adapter, and none are exported; nor are any with `alone`.
"""

import json
from pathlib import Path

import torch

from benchmarks import logits
from conf.schema.run import Run
from contract import checkpoints


def main(run: Run) -> None:
    from trainer.megatron.recipe import make_adapter

    folder = Path(run.paths.output)
    asked = json.loads((folder / "request.json").read_text())
    bridge, _, model = logits.built(run)
    adapter = None if "released" in asked else make_adapter(run)
    if "released" in asked:
        load_released(bridge, model, asked["released"])
    else:
        logits.load(model, checkpoints.step_folder(Path(run.paths.base), 0))
    if adapter and ("invent" in asked or "checkpoint" in asked):
        model = adapter(model, training=False)
    if "checkpoint" in asked:
        logits.load(model, Path(asked["checkpoint"]), ".adapter." if adapter else "")
    if "invent" in asked:
        invent(model)
        save(run, model, Path(asked["invent"]))
    model[0].eval()
    tokens = torch.tensor(asked["tokens"])
    with torch.no_grad():
        found = model[0](tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).float()
    shares = [torch.empty_like(found) for _ in range(run.layout.tp)]  # of the vocabulary
    torch.distributed.all_gather(shares, found.contiguous())
    alone = "released" in asked or "alone" in asked
    weights = {} if alone else dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    if torch.distributed.get_rank() == 0:
        torch.save({"logits": torch.cat(shares, -1), "weights": weights}, folder / "found.pt")
    torch.distributed.destroy_process_group()


def load_released(bridge, model, folder: str) -> None:
    """Load every tensor of the model, or none, by Bridge, which passes stacks of all experts to its mappings."""
    from megatron.bridge.models.gpt_oss import gpt_oss_bridge
    from megatron.bridge.utils.common_utils import extract_expert_number_from_param

    from trainer.weights import coverage

    for kind in (gpt_oss_bridge.GPTOSSMLPGateUpProjMapping, gpt_oss_bridge.GPTOSSMLPDownProjMapping):
        kind.hf_to_megatron = lambda mapping, stack, module, of_one=kind.hf_to_megatron: of_one(
            mapping, stack[extract_expert_number_from_param(mapping.megatron_param)], module
        )
    tensors = [tensor for _, tensor in coverage.named_tensors(model) if tensor.is_floating_point()]
    for tensor in tensors:
        tensor.data.fill_(float("nan"))
    bridge.load_hf_weights(model, folder)
    assert not any(tensor.isnan().any() for tensor in tensors)


def invent(model) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model[0].named_parameters():
        if name.endswith(".adapter.linear_out.weight"):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith(".adapter.weight_magnitude"):
            parameter.data.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def save(run: Run, model, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True)
    dist_checkpointing.save(logits.stored(model, ".adapter."), str(folder))
    (folder / "run_config.yaml").write_text(f"peft: {{dim: {run.adapter.rank}, alpha: {run.adapter.alpha}}}\n")
    checkpoints.mark(folder, step=1)
