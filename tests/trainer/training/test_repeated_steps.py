"""A rank that computes a wrong gradient is found when the step is repeated, and the training stays the same."""

import json
import re

import pytest

KEYS = ["adapter.kind=none", "optimizer.lr=1e-3", "train.steps=6", "train.global_batch=12", "train.verify_every=0"]


@pytest.fixture
def train(configure, base, ranks, tmp_path):
    """train(model, flip, *keys) -> result of a training with this flip (tests/support/ranks/train_with_flips.py)."""

    def train(model: str, flip: dict, *keys: str, name: str = "run"):
        base(model)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "flip.json").write_text(json.dumps({"what": "local", "step": 4, "passes": []} | flip))
        last = {key.partition("=")[0]: key for key in (*KEYS, *keys, f"paths.output={folder}")}
        return ranks("train_with_flips", configure(model, *last.values()))

    return train


def figures(result) -> dict[int, tuple]:
    lines = [line for line in result.metrics if line["kind"] == "train"]
    return {line["step"]: (line["lm_loss"], line["grad_norm"]) for line in lines}


def of(result) -> list[str]:
    return [line.removeprefix("error: ") for line in result.output.splitlines() if line.startswith("error: ")]


# The passes of step 4 in which rank 1 flips a bit: with another's batches, in the step itself, or always.
@pytest.mark.parametrize("passes", [[1], pytest.param([2], marks=pytest.mark.slow), [1, 2, 3]])
def test_a_wrong_gradient_is_found_and_its_rank_named(train, passes):
    flip = {"ranks": [1], "name": "linear_proj.weight", "bit": 5, "passes": passes}
    result = train("llama", flip, "layout.gpus_per_node=3", "train.repeat_every=2")
    assert result.code == 2, result.output
    assert max(figures(result)) == 3
    (line,) = of(result)
    text = r"corruption: node 0, host \S+, rank 1: step 4: bits have changed: gradient of .*linear_proj.weight; "
    assert re.fullmatch(text + "to be left out", line)


def test_a_single_rank_knows_an_error_from_kernels_that_are_not_deterministic(train):
    flip = {"ranks": [0], "name": "linear_fc1.weight", "bit": 5}
    once = train("llama", flip | {"passes": [2]}, "train.repeat_every=100", "checkpoint.save_every=4", name="once")
    assert once.code == 2 and "rank 0: step 4: bits have changed: gradient of " in once.output, once.output
    each = train("llama", flip | {"passes": [1, 2, 3], "grows": True}, "train.repeat_every=2")
    assert each.code == 0, each.output
    assert "step 4: train.repeat_every: kernels of this run are not deterministic" in each.output


def test_of_two_replicas_that_repeat_their_results_none_is_left_out(train):
    flip = {"ranks": [1], "name": "linear_fc1.weight", "bit": 5, "passes": [1, 2, 3]}
    result = train("llama", flip, "layout.gpus_per_node=2", "train.repeat_every=2")
    assert result.code == 2, result.output
    (line,) = of(result)
    text = (
        r"corruption: node 0, host \S+, rank 0: step 4: differs from rank 1, and no other rank can decide: gradient .*"
    )
    assert re.fullmatch(text, line)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=2 sp=true", "tp=2 sp=true ep=2", "pp=2", "ep=2", "cp=2"])
def test_the_training_is_the_same(train, layout, precision):
    cut = [f"layout.{pair}" for pair in layout.split()] + ["layout.gpus_per_node=4", f"train.precision={precision}"]
    usual = train("glm4-moe", {}, *cut, "train.global_batch=8", name="usual")
    repeated = train("glm4-moe", {}, *cut, "train.global_batch=8", "train.repeat_every=1")
    assert usual.code == repeated.code == 0, usual.output + repeated.output
    assert "deterministic" not in repeated.output
    assert figures(repeated) == figures(usual)
