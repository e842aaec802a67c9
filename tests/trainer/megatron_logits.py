"""Logits of Megatron's model, on one rank; reads jobs, one line of JSON each. Started by test_export.py.

A job has run, tokens and out; with `checkpoint`, that adapter is loaded on top of the base. With `invent`, the adapter
gets random values and is saved there as a checkpoint, as training would save it; `merged` wants Bridge's own merge too.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from conf.schema import Run  # noqa: E402
from trainer import checkpoints, forked  # noqa: E402


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr
    forked.import_all()
    for line in sys.stdin:
        job = json.loads(line)
        run = Run.model_validate_json(json.dumps(job["run"]))
        code = forked.call(lambda run, job=job: answer(run, job), run, Path(job["out"]).with_suffix(".log"))
        replies.write(json.dumps(code) + "\n")
        replies.flush()


def answer(run: Run, job: dict) -> None:
    import torch
    from megatron.core import dist_checkpointing

    from trainer.model import make_provider, open_bridge
    from trainer.recipe import make_adapter

    torch.distributed.init_process_group("gloo")
    bridge = open_bridge(run)
    provider = make_provider(run, bridge)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    load(model, Path(run.paths.base) / "iter_0000000", lambda key: True)
    if "invent" in job:
        model = make_adapter(run)(model, training=False)
        invent(model)
        save(run, model, Path(job["invent"]))
    elif "checkpoint" in job:
        model = make_adapter(run)(model, training=False)
        load(model, Path(job["checkpoint"]), lambda key: ".adapter." in key)
    model[0].eval()
    tokens = torch.tensor(job["tokens"])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        found = {"logits": model[0](tokens, positions, None).float()}
    if job.get("merged"):
        found |= dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    torch.save(found, job["out"])


def adapter_state(model, keep) -> dict:
    state = model[0].sharded_state_dict()
    return {key: value for key, value in state.items() if keep(key) and "_extra_state" not in key}


def load(model, folder: Path, keep) -> None:
    from megatron.core import dist_checkpointing

    model[0].load_state_dict(dist_checkpointing.load(adapter_state(model, keep), str(folder)), strict=False)


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
    dist_checkpointing.save(adapter_state(model, lambda key: ".adapter." in key), str(folder))
    (folder / "run_config.yaml").write_text(f"peft: {{dim: {run.adapter.rank}, alpha: {run.adapter.alpha}}}\n")
    checkpoints.mark(folder, step=1)


if __name__ == "__main__":
    main()
