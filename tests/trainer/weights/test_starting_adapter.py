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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["adapter.rank=4"], "adapter.rank: 4, but"),
        (["adapter.alpha=8"], "adapter.alpha: 8 scales the adapter's output by 1, but"),
    ],
)
def test_another_rank_or_scale_is_one_line(exported, configure, changes, says):
    name, folder = exported
    with pytest.raises(Fault, match=f"^{says}"):
        inputs.check_adapter(configure(name, f"model.adapter={folder}", *changes))
    with pytest.raises(Fault, match=r"^model\.adapter: nowhere: no adapter_config\.json; it is a folder"):
        inputs.check_adapter(configure(name, "model.adapter=nowhere"))


@pytest.mark.parametrize(("alpha", "rooted"), [(16, False), (16, True), (16 * 8**0.5, False)])
def test_the_scale_that_is_proposed_is_taken(configure, tmp_path, alpha, rooted):
    """The last one is what an export of rsLoRA has for its alpha, of which adapter.alpha is a whole number."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "use_rslora": rooted}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(Fault) as refused:
        inputs.check_adapter(configure("llama", f"model.adapter={tmp_path}", "adapter.alpha=3"))
    proposed = str(refused.value).rpartition("; ")[2].split()
    inputs.check_adapter(configure("llama", f"model.adapter={tmp_path}", *proposed))


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
    assert refused.code == 2 and "is of another model: decoder.layers.0.self_attention.linear_proj" in refused.output


def test_another_trainers_unlike_matrices_are_refused(exported, configure, ranks, work):
    from safetensors.torch import load_file, save_file

    name, folder = exported
    foreign = work / f"foreign-{name}"
    shutil.copytree(folder, foreign)
    tensors = load_file(foreign / "adapter_model.safetensors")
    tensors[next(key for key in tensors if "q_proj.lora_A" in key)] += 1
    save_file(tensors, foreign / "adapter_model.safetensors")
    refused = ranks("train", configure(name, f"model.adapter={foreign}", f"paths.output={work}/foreign-{name}-output"))
    assert refused.code == 2 and "differ, but Megatron has one for all" in refused.output
    (foreign / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(Fault, match="is IA3, but only LoRA can be continued"):
        inputs.check_adapter(configure(name, f"model.adapter={foreign}"))


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
