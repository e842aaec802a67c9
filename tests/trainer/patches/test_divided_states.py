"""trainer/patches/checkpoints/divided_states.py: each rank saves its part of the optimizer's states, bit by bit."""

import subprocess
import sys

import pytest

from tests.trainer.patches.test_upstream import text


@pytest.mark.parametrize("model, cut", [("qwen3-moe", ["ep=2"]), ("qwen3-next", ["tp=2", "sp=true"])])
def test_blocks_have_the_states_that_megatron_core_gathers(configure, base, ranks, tmp_path, model, cut):
    base(model)
    keys = {"adapter.kind": "none", "layout.gpus_per_node": 4, "paths.output": tmp_path, "train.global_batch": 8}
    keys |= {"train.steps": 2, "checkpoint.save_every": 2, "train.validate_every": 0}
    made = configure(model, *(f"{key}={value}" for key, value in keys.items()), *(f"layout.{key}" for key in cut))
    result = ranks("train_comparing_states", made)
    assert result.code == 0, result.output
    counts = []
    for rank in range(4):
        lines = [line.split() for line in (tmp_path / f"states-{rank}.txt").read_text().splitlines()]
        assert {key.split(".")[2] for key, _ in lines} == {"param", "exp_avg", "exp_avg_sq"}
        counts.append(sum(int(count) for _, count in lines))
    assert max(counts) < 1.1 * min(counts)  # each holds its share


def test_megatron_core_gathers_whole_buffers():
    source = text("megatron-core", "megatron/core/optimizer/distrib_optimizer.py")
    assert source.count("dp_zero_state_dict = self.get_parameter_state_dp_zero(") == 1
    source = text("megatron-core", "megatron/core/dist_checkpointing/mapping.py")
    assert "ShardedTensor.flattened_range is not supported" in source


@pytest.mark.slow
def test_a_save_and_a_resume_take_no_more_memory_than_planned():
    command = [sys.executable, "-m", "benchmarks.save", "--layers", "5", "--only", "dense", "--ranks", "2"]
    header, row = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = dict(zip(header.split()[1:], map(float, row.split()[1:]), strict=True))
    assert 0.85 < found["most/plan"] < 1.15
