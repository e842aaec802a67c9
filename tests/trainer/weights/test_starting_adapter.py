"""trainer/weights/starting_adapter.py: a training goes on with an adapter that another one has exported."""

import json
import math
import shutil

import numpy as np
import pytest

from contract.faults import Fault
from trainer.checks import inputs
from trainer.data import references
from trainer.data.tickets import tickets, with_worse


def losses(result) -> list[float]:
    assert result.code == 0, result.output
    return [line["lm_loss"] for line in result.metrics if line["kind"] == "train"]


@pytest.fixture(
    scope="module", params=["glm4-moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gpt-oss"))]
)
def exported(request, configure, base, ranks, work):
    """A model, and the folder of an adapter of it, which an export has written."""
    base(request.param)
    places = [f"paths.output={work}/first-{request.param}", f"paths.export={work}/first-{request.param}-export"]
    run = configure(request.param, *places, "export.formats=[adapter]")
    assert ranks("train", run).code == 0
    assert ranks("export", run).code == 0
    return request.param, work / f"first-{request.param}-export" / "adapter"


def test_it_starts_with_the_weights_of_the_export_at_any_layout(exported, configure, ranks, work):
    """At so small a learning rate, what it exports is what it started from."""
    name, folder = exported
    still = [f"model.adapter={folder}", "optimizer.lr=1e-5", "optimizer.weight_decay=0", "train.steps=2"]
    for cut in ([], ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true"]):
        places = [f"paths.output={work}/again-{name}-{len(cut)}", f"paths.export={work}/again-{name}-{len(cut)}-export"]
        run = configure(name, *places, "export.formats=[adapter]", *still, *cut)
        losses(ranks("train", run))
        assert ranks("export", run).code == 0
        assert same(folder, work / f"again-{name}-{len(cut)}-export" / "adapter")


def same(one, other) -> bool:
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.allclose(first[key], second[key], atol=5e-5) for key in first)


def test_a_smaller_rank_and_no_adapter_are_one_line(exported, configure):
    name, folder = exported
    with pytest.raises(Fault, match=r"^adapter\.rank: 4, but .* needs 8; adapter\.rank=8, or model\.merge_adapter"):
        inputs.check_adapter(configure(name, f"model.adapter={folder}", "adapter.rank=4"))
    with pytest.raises(Fault, match=r"^model\.adapter: nowhere: no adapter_config\.json; it is a folder"):
        inputs.check_adapter(configure(name, "model.adapter=nowhere"))


def test_layers_without_a_place_are_one_line(exported, configure, ranks, work):
    name, folder = exported
    fewer = [f"paths.output={work}/fewer-{name}", "adapter.targets=[linear_qkv]"]
    refused = ranks("train", configure(name, f"model.adapter={folder}", *fewer))
    assert refused.code == 2 and "adapter.targets has no place for" in refused.output


def test_an_adapter_of_another_model_is_one_line(exported, configure, ranks, work):
    from safetensors.torch import load_file, save_file

    name, folder = exported
    wider = work / f"wider-{name}"
    shutil.copytree(folder, wider)
    tensors = load_file(wider / "adapter_model.safetensors")
    key = next(key for key in tensors if "o_proj.lora_A" in key)
    save_file(tensors | {key: tensors[key].repeat(1, 2)}, wider / "adapter_model.safetensors")
    refused = ranks("train", configure(name, f"model.adapter={wider}", f"paths.output={work}/wider-{name}-output"))
    assert (
        refused.code == 2 and "o_proj.lora_A.weight is [8, " in refused.output and "which do not fit" in refused.output
    )


def test_another_trainers_adapter_is_the_same_function(exported, configure, ranks, work):
    """Its q_proj, k_proj and v_proj have different A's, of different ranks and scales; some layers have no adapter."""
    import torch
    from safetensors.torch import load_file, save_file

    name, folder = exported
    foreign = work / f"foreign-{name}"
    foreign.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    few = {key: tensors[key] for key in tensors if "layers.1.self_attn" in key or ("layers.1." in key and "exp" in key)}
    for key in [key for key in few if "k_proj" in key]:
        few[key] = 2 * (few[key][:3] if "lora_A" in key else few[key][:, :3]).contiguous()
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"k_proj": 5}}
    save_file(few, foreign / "adapter_model.safetensors")
    (foreign / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(Fault, match=r"adapter\.rank: 8, but .* needs 11, as the A's of .*k_proj.* differ"):
        inputs.check_adapter(configure(name, f"model.adapter={foreign}"))
    places = [f"paths.output={work}/of-foreign-{name}", f"paths.export={work}/of-foreign-{name}-export"]
    still = ["adapter.rank=12", "adapter.alpha=5", "optimizer.lr=1e-6", "optimizer.weight_decay=0", "train.steps=1"]
    run = configure(name, *places, *still, "export.formats=[adapter]", f"model.adapter={foreign}")
    losses(ranks("train", run))
    assert ranks("export", run).code == 0
    ours = load_file(work / f"of-foreign-{name}-export/adapter/adapter_model.safetensors")
    for key in (key for key in ours if "lora_A" in key and ".experts" not in key):
        other, scale = key.replace("lora_A", "lora_B"), 5 / 3 if "k_proj" in key else config["lora_alpha"] / 8
        expected = scale * few[other] @ few[key] if key in few else torch.zeros(())
        assert (5 / 12 * ours[other] @ ours[key] - expected).abs().max() < 1e-4, key


@pytest.mark.slow
def test_dpo_compares_with_what_it_starts_from(exported, configure, ranks, work):
    name, folder = exported
    if name == "gpt-oss":
        return
    ranked = work / f"ranked-{name}"
    ranked.mkdir()
    rows = [json.dumps(row) + "\n" for row in with_worse(tickets(48, seed=1), seed=1)]
    (ranked / "training.jsonl").write_text("".join(rows[:32]))
    (ranked / "validation.jsonl").write_text("".join(rows[32:]))
    places = {key: f"{work}/dpo-{name}-{key}" for key in ("output", "reference")} | {"data": str(ranked)}
    given = ["train.objective=dpo", "train.steps=3", "train.global_batch=8"]
    given += [f"paths.{key}={place}" for key, place in places.items()]
    base, run = (configure(name, *given, *more) for more in ([], [f"model.adapter={folder}"]))
    (work / f"dpo-{name}-reference").mkdir()
    assert ranks("reference", base).code == 0
    of_base = np.load(f"{places['reference']}/training.npy")
    with pytest.raises(Fault, match="was written for another adapter than this run"):
        references.check(run)
    asked = ranks("reference", run)
    assert asked.code == 0, asked.output
    assert abs(np.load(f"{places['reference']}/training.npy") - of_base).max() > 0.01
    first = losses(ranks("train", run))[0]
    assert first == pytest.approx(math.log(2), abs=1e-5)
