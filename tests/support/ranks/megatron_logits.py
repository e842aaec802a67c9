"""Logits of Megatron's model; reads jobs, one line of JSON each.

A job has run, tokens and out. With `checkpoint` it is that checkpoint's model: the adapter on top of the base, or all
weights where run.adapter.kind is none. With `invent`, the adapter gets random values and is saved there as training
would save it. The weights that Megatron-Bridge would export go into the same file as the logits. With `released`, that
folder's weights are those of the model in run.paths.model, without an adapter, and none are exported.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from conf.schema.run import Run
from contract import checkpoints
from trainer.rehearsal import forked_ranks


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr
    forked_ranks.import_all()
    for line in sys.stdin:
        job = json.loads(line)
        run = Run.model_validate_json(json.dumps(job["run"]))
        code = forked_ranks.call(lambda run, job=job: answer(run, job), run, Path(job["out"]).with_suffix(".log"))
        replies.write(json.dumps(code) + "\n")
        replies.flush()


def answer(run: Run, job: dict) -> None:
    import torch

    from trainer.megatron.model import make_provider, open_bridge
    from trainer.megatron.recipe import make_adapter

    torch.distributed.init_process_group("gloo")
    bridge = open_bridge(run)
    provider = make_provider(run, bridge)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    adapter = None if "released" in job else make_adapter(run)
    if "released" in job:
        load_released(bridge, model, job["released"])
    else:
        load(model, Path(run.paths.base) / "iter_0000000")
    if adapter and ("invent" in job or "checkpoint" in job):
        model = adapter(model, training=False)
    if "checkpoint" in job:
        load(model, Path(job["checkpoint"]), ".adapter." if adapter else "")
    if "invent" in job:
        invent(model)
        save(run, model, Path(job["invent"]))
    model[0].eval()
    tokens = torch.tensor(job["tokens"])
    with torch.no_grad():
        logits = model[0](tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).float()
    shares = [torch.empty_like(logits) for _ in range(run.layout.tp)]  # of the vocabulary
    torch.distributed.all_gather(shares, logits.contiguous())
    weights = {} if "released" in job else dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    if torch.distributed.get_rank() == 0:
        torch.save({"logits": torch.cat(shares, -1), "weights": weights}, job["out"])
    torch.distributed.destroy_process_group()


def load_released(bridge, model, folder: str) -> None:
    """Load every tensor of the model, or none."""
    from trainer.weights import coverage

    coverage.fill_with_nan(model)
    bridge.load_hf_weights(model, folder)
    assert not coverage.unfilled(model)


def state_of(model, part: str) -> dict:
    state = model[0].sharded_state_dict()
    return {key: value for key, value in state.items() if part in key and "_extra_state" not in key}


def load(model, folder: Path, part: str = "") -> None:
    from megatron.core import dist_checkpointing

    model[0].load_state_dict(dist_checkpointing.load(state_of(model, part), str(folder)), strict=False)


def invent(model) -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    for name, parameter in model[0].named_parameters():
        if name.endswith(".adapter.linear_out.weight"):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith(".adapter.weight_magnitude"):
            parameter.data.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def save(run: Run, model, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True)
    dist_checkpointing.save(state_of(model, ".adapter."), str(folder))
    (folder / "run_config.yaml").write_text(f"peft: {{dim: {run.adapter.rank}, alpha: {run.adapter.alpha}}}\n")
    checkpoints.mark(folder, step=1)


if __name__ == "__main__":
    main()
