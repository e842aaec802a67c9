"""What an export is held to: a checkpoint in which a trained tensor was lost, moved or altered is refused by name."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

from contract import checkpoints
from trainer.weights import torch_dist

FC1 = "decoder.layers.2.mlp.experts.experts.linear_fc1"
QKV = "decoder.layers.{}.self_attention.linear_qkv.adapter.linear_out.weight"


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work):
    base("glm4-moe")
    output = work / "lost"
    paths = (f"paths.output={output}", f"paths.parity={output}/parity.json", f"paths.export={output}/export")
    run = configure("glm4-moe", *paths, "train.steps=3", "checkpoint.save_every=2", "optimizer.warmup_steps=0")
    result = ranks("train", run)
    assert result.code == 0, result.output
    return run


def keys_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor, whole, by the name that the checkpoint gives it."""
    stored = torch_dist.open_checkpoint(folder)
    found = {}
    for place in stored.places.values():
        if place.key not in found:
            found[place.key] = torch.zeros(
                tuple(stored.metadata.state_dict_metadata[place.key].size), dtype=place.dtype
            )
        found[place.key][place.index] = torch_dist.read(stored, place)
    return found


@pytest.fixture
def altered(trained, ranks, tmp_path):
    """altered(change) -> the export of the checkpoint with that change in its tensors, with its mark anew."""
    source = Path(trained.paths.output) / "checkpoints/iter_0000003"

    def altered(change=None, file=None):
        folder = tmp_path / "output/checkpoints/iter_0000003"
        tensors = keys_of(source)
        if change:
            tensors = change(tensors) or tensors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is but one process
            save_torch_dist(tensors, checkpoint_id=folder, no_dist=True)
        for name in ("run_config.yaml", "tensors.json"):
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        if file:
            file(folder)
        checkpoints.mark(folder, step=3)
        paths = {"output": str(tmp_path / "output"), "export": str(tmp_path / "export")}
        return ranks("export", trained.model_copy(update={"paths": trained.paths.model_copy(update=paths)}))

    return altered


def lose_half_of_a_layer_s_experts(tensors):
    for role in ("in", "out"):
        tensors[f"{FC1}.adapter.linear_{role}.weight"][4:] = 0


def lose_a_layer_s_experts(tensors):
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(FC1)}


def lose_half_of_the_experts_from_the_metadata(tensors):
    return {key: t[:4].clone() if key.startswith(FC1) else t for key, t in tensors.items()}


def swap_two_layers(tensors):
    tensors[QKV.format(1)], tensors[QKV.format(2)] = tensors[QKV.format(2)], tensors[QKV.format(1)]


def swap_two_experts(tensors):
    key = f"{FC1}.adapter.linear_out.weight"
    tensors[key] = tensors[key][[1, 0, *range(2, 8)]].contiguous()


def permute_shards(tensors):
    """As if two ranks' pieces were put together in the wrong order."""
    tensors[QKV.format(1)] = tensors[QKV.format(1)].roll(256, 0)


def scale_a_little(tensors):
    tensors[QKV.format(3)] *= 1.001


def take_another_step(tensors, trained):
    tensors |= keys_of(Path(trained.paths.output) / "checkpoints/iter_0000002")


FAULTS = {
    lose_half_of_a_layer_s_experts: "decoder.layers.2.mlp.experts.linear_fc1.adapter.linear_",
    lose_a_layer_s_experts: "16 of the 128 tensors that training had in memory are not in it: "
    "decoder.layers.2.mlp.experts.linear_fc1.adapter.linear_in.weight0, ",
    lose_half_of_the_experts_from_the_metadata: "8 of the 128 tensors that training had in memory are not in it: "
    "decoder.layers.2.mlp.experts.linear_fc1.adapter.linear_in.weight4, ",
    swap_two_layers: f"{QKV.format(1)} is not the tensor that training had in memory: it is that of {QKV.format(2)}",
    swap_two_experts: "linear_out.weight0 is not the tensor that training had in memory: it is that of "
    "decoder.layers.2.mlp.experts.linear_fc1.adapter.linear_out.weight1",
    permute_shards: f"{QKV.format(1)} is not the tensor that training had in memory: it is of another step",
    scale_a_little: f"{QKV.format(3)} is not the tensor that training had in memory: it is of another step",
}


def test_what_training_had_in_memory_is_exported_and_said(altered):
    result = altered()
    assert result.code == 0, result.output
    assert (
        "export: 128 of 128 trained tensors are those that were in memory at step 3, by their digests" in result.output
    )


SLOW = (lose_half_of_the_experts_from_the_metadata, swap_two_experts, scale_a_little)


@pytest.mark.parametrize(
    "change",
    [pytest.param(change, marks=[pytest.mark.slow] * (change in SLOW), id=change.__name__) for change in FAULTS],
)
def test_a_checkpoint_that_lost_or_confused_trained_tensors_is_not_exported(change, altered, tmp_path):
    result = altered(change)
    assert result.code == 2, result.output
    assert FAULTS[change] in result.output
    assert not (tmp_path / "export").exists()


def test_tensors_of_another_step_are_not_exported(altered, trained):
    result = altered(lambda tensors: take_another_step(tensors, trained))
    assert result.code == 2, result.output
    assert "is not the tensor that training had in memory: it is of another step" in result.output


def test_another_alpha_than_the_trained_one_is_not_exported(altered):
    def edit(folder: Path) -> None:
        file = folder / "run_config.yaml"
        text = file.read_text()
        assert text.count("alpha: 16") == 1
        file.write_text(text.replace("alpha: 16", "alpha: 64"))

    result = altered(file=edit)
    assert result.code == 2, result.output
    assert "run_config.yaml: peft.alpha is 64; the adapter was trained with 16" in result.output


def test_a_checkpoint_without_digests_is_exported_and_said(altered):
    result = altered(file=lambda folder: (folder / "tensors.json").unlink(missing_ok=True))
    assert result.code == 0, result.output
    assert "iter_0000003 has no digests of training's memory, so its tensors were not compared" in result.output


def test_digests_that_are_gone_make_the_checkpoint_incomplete(trained, ranks, tmp_path):
    shutil.copytree(Path(trained.paths.output) / "checkpoints", tmp_path / "output/checkpoints")
    (tmp_path / "output/checkpoints/iter_0000003/tensors.json").unlink()
    assert checkpoints.complete_steps(tmp_path / "output/checkpoints") == [2]


def test_the_mark_says_which_weights_the_export_holds(trained, ranks):
    result = ranks("export", trained)
    assert result.code == 0, result.output
    mark = json.loads((Path(trained.paths.export) / "complete.json").read_text())
    assert mark["trained"]["prompts"] == 6 and len(mark["trained"]["weights"]) == 64
