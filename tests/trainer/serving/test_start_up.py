"""trainer/serving/start_up.py: what vLLM is started with, and by which path it reads a model."""

import json
import shutil
from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.rehearsal import tiny_models
from trainer.serving import start_up


def configured(tmp_path: Path, *overrides: str, **config: int):
    (tmp_path / "served").mkdir(exist_ok=True)
    (tmp_path / "served/config.json").write_text(json.dumps(tiny_models.KINDS["llama"] | config))
    return load("tiny", [f"paths.served={tmp_path}/served", *overrides])


@pytest.mark.parametrize(("length", "eager"), [(256, True), (2048, False)])
def test_graphs_are_captured_where_they_save_more_than_they_take(length, eager, tmp_path):
    run = configured(tmp_path, f"evaluate.max_tokens={length}")
    settings = start_up.settings(run, 512, "bf16", cpu=False)
    assert settings.get("enforce_eager", False) == eager
    assert settings.get("optimization_level", 2) == (0 if eager else 2)


def test_a_cpu_has_no_graphs_and_a_large_vocabulary_leaves_room_for_its_log_probabilities(tmp_path):
    run = configured(tmp_path, "evaluate.eager=false", vocab_size=151_552)
    on_cpu = {"max_model_len": 512, "max_num_seqs": 200, "enforce_eager": True}
    assert start_up.settings(run, 512, "bf16", cpu=True) == on_cpu
    found = start_up.settings(run, 512, "bf16", cpu=False)
    assert found["max_num_batched_tokens"] == 2048 and found["gpu_memory_utilization"] == 0.9
    assert start_up.settings(configured(tmp_path), 512, "bf16", cpu=False)["max_num_batched_tokens"] == 8192


@pytest.mark.parametrize(("needed", "most", "length"), [(512, 1024, 512), (513, 1024, 1024), (1025, 1500, 1500)])
def test_lengths_are_powers_of_two_as_far_as_the_model_reads(needed, most, length, tmp_path):
    overrides = ["data.seq_length=256", f"evaluate.max_tokens={needed - 256}"]
    assert start_up.length(configured(tmp_path, *overrides, max_position_embeddings=most)) == length


def model(folder: Path, config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    return folder


def test_models_of_one_shape_have_one_path_after_one_another_and_two_at_once(tmp_path):
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    kernels = tmp_path / "kernels"
    with start_up.fixed_name(kernels, one, "bf16") as first:
        assert first.resolve() == one
        with start_up.fixed_name(kernels, other, "bf16") as second:
            assert second != first and second.resolve() == other and first.resolve() == one
    with start_up.fixed_name(kernels, other, "bf16") as again:
        assert again == first and again.resolve() == other


def test_another_shape_or_precision_has_another_path(tmp_path):
    one, other = model(tmp_path / "one"), model(tmp_path / "other", '{"vocab_size": 2}')
    paths = set()
    for folder, precision in ((one, "bf16"), (one, "fp32"), (other, "bf16")):
        with start_up.fixed_name(tmp_path / "kernels", folder, precision) as path:
            paths.add(path)
    assert len(paths) == 3


def test_without_room_for_a_link_the_model_is_read_by_its_own_path(tmp_path):
    (tmp_path / "kernels").write_text("in the way")
    one = model(tmp_path / "one")
    with start_up.fixed_name(tmp_path / "kernels", one, "bf16") as path:
        assert path == one


def test_a_link_that_somebody_changes_meanwhile_is_found(tmp_path):
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    with (
        pytest.raises(Fault, match="another process has changed this link; evaluate again"),
        start_up.fixed_name(tmp_path / "kernels", one, "bf16") as path,
    ):
        path.unlink()
        path.symlink_to(other)
    shutil.rmtree(tmp_path / "kernels")
    with start_up.fixed_name(tmp_path / "kernels", one, "bf16") as path:
        assert path.resolve() == one
