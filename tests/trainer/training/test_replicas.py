"""A bit that changes on one rank is found within train.verify_every steps, and the line names its host."""

import errno
import json
import os
import re
from statistics import median

import pytest

from contract import checkpoints
from contract.faults import Fault
from tasks.gang.diagnosis.classify import Evidence, Rank, classify
from tests.support.damage import Flip
from trainer.training import resume
from trainer.weights import file_sums

FULL = ["adapter.kind=none", "optimizer.lr=1e-3", "optimizer.warmup_steps=0"]
SHARED = ["train.steps=6", "train.verify_every=2", "checkpoint.save_every=100", "train.global_batch=12"]


@pytest.fixture
def train(configure, base, ranks, tmp_path):
    """train(model, flip, *keys) -> result of a training with this flip (tests/support/ranks/train_with_flips.py)."""

    def train(model: str, flip: dict, *keys: str):
        base(model)
        (tmp_path / "flip.json").write_text(json.dumps(flip))
        last = {key.partition("=")[0]: key for key in (*SHARED, *keys, f"paths.output={tmp_path}")}
        return ranks("train_with_flips", configure(model, *last.values()))

    return train


def lines(result) -> list[str]:
    return [line.removeprefix("error: ") for line in result.output.splitlines() if line.startswith("error: ")]


def losses(result) -> dict[int, float]:
    return {line["step"]: line["lm_loss"] for line in result.metrics if line["kind"] == "train"}


def _raise(error: Exception) -> None:
    raise error


def last_step(result) -> int:
    return max(line["step"] for line in result.metrics if line["kind"] == "train")


FLIPS = {
    "frozen": ({"what": "weight", "name": "linear_qkv.to_wrap.weight"}, ["layout.gpus_per_node=2"]),
    "trained": ({"what": "weight", "name": "linear_fc1.weight"}, [*FULL, "layout.gpus_per_node=3"]),
    "gradient": (
        {"what": "gradient", "name": "linear_proj.weight"},
        [*FULL, "layout.gpus_per_node=3", "optimizer.distributed=false"],
    ),
    "of two": ({"what": "weight", "name": "linear_fc2.weight"}, [*FULL, "layout.gpus_per_node=2"]),
}


LAYOUTS = [f"gpus_per_node=4 {cut}" for cut in ("tp=2 sp=true", "tp=2 sp=true ep=2", "pp=2", "ep=2")]


def test_a_checkpoint_of_changed_weights_is_not_completed(train, tmp_path):
    """Otherwise the next attempt would resume from it."""
    flip = {"what": "weight", "step": 4, "ranks": [1], "name": "linear_qkv.to_wrap.weight", "bit": 3}
    result = train("llama", flip, "layout.gpus_per_node=2", "train.verify_every=0", "checkpoint.save_every=3")
    assert result.code == 2, result.output
    assert "rank 1: step 6: bits have changed: " in lines(result)[0]
    assert checkpoints.complete_steps(tmp_path / "checkpoints") == [3]


def test_a_changed_file_of_a_checkpoint_is_named_and_the_one_before_is_used(train, tmp_path, monkeypatch):
    keys = [*FULL, "layout.gpus_per_node=2", "checkpoint.save_every=2"]
    whole = train("llama", {}, *keys)
    assert whole.code == 0, whole.output
    folder = tmp_path / "checkpoints"
    damaged = sorted((folder / "iter_0000006").glob("*.distcp"))[1]
    Flip(damaged.name, 0.5, 3).apply(damaged.parent)
    for node in ("0", "1"):  # hosts of a gang share the files
        monkeypatch.setenv("RANK", node)
        monkeypatch.setenv("WORLD_SIZE", "2")
        others = file_sums.changed(damaged.parent, int(node), 2)
        if others:
            mark = (damaged.parent / checkpoints.MARK).read_text()
            with pytest.raises(Fault, match=f"{damaged}: has changed .* resumes from step 4") as fault:
                resume.verify(folder)
            (damaged.parent / checkpoints.MARK).write_text(mark)
            failure = classify(Evidence((Rank(0, "a", 2, 6, (f"error: {fault.value}",), 0),)))
            assert (failure.kind, failure.retry, failure.blamed) == ("storage", True, ())
        else:
            resume.verify(folder)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with monkeypatch.context() as away, pytest.raises(Fault, match="Stale file handle: the checkpoint cannot be"):
        away.setattr(file_sums, "of", lambda _: _raise(OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        resume.verify(folder)
    assert checkpoints.complete_steps(folder)[-1] == 6  # it may be whole
    said = []
    monkeypatch.setattr(resume, "say", said.append)
    resume.verify(folder)
    assert said == [f"train: {damaged}: has changed since the checkpoint was written; training resumes from step 4"]
    assert checkpoints.complete_steps(folder) == [2, 4]
    again = train("llama", {}, *keys)
    assert again.code == 0, again.output
    assert losses(again) == losses(whole)


def test_loaded_weights_are_compared_with_those_that_were_saved(train, tmp_path):
    keys = [*FULL, "checkpoint.save_every=2"]
    assert train("llama", {}, *keys, "train.stop_after=4").code == 0
    result = train("llama", {"what": "loaded", "step": 5, "ranks": [0], "name": "linear_fc1.weight", "bit": 0}, *keys)
    assert result.code == 2, result.output
    assert lines(result) == [
        f"{tmp_path}/checkpoints/iter_0000004: 1 loaded tensors differ from those that were saved: "
        "decoder.layers.0.mlp.linear_fc1.weight"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_without_a_flip_nothing_is_reported(train, layout, precision, kind):
    keys = [f"layout.{pair}" for pair in layout.split()] + [f"train.precision={precision}", f"adapter.kind={kind}"]
    keys += ["optimizer.lr=1e-3", f"optimizer.distributed={str('pp' in layout or 'tp' in layout).lower()}"]
    result = train("glm4-moe", {}, *keys, "train.verify_every=1", "train.global_batch=8")
    assert result.code == 0, result.output
    assert last_step(result) == 6


@pytest.mark.parametrize("name", ["frozen", "gradient", "of two", pytest.param("trained", marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_and_its_rank_named(train, name):
    flip, keys = FLIPS[name]
    keys = [*keys, *(["train.precision=bf16"] if name == "of two" else [])]
    result = train("llama", {"step": 4, "ranks": [1], "bit": 3, **flip}, *keys)
    assert result.code == 2, result.output
    assert last_step(result) == 3  # it is found before the optimizer's step
    (line,) = lines(result)
    name = re.escape(flip["name"])
    assert re.fullmatch(
        rf"corruption: node 0, host \S+, rank 1: step 4: bits have changed: .*{name}; to be left out", line
    )
    failure = classify(Evidence(tuple(Rank(n, "ab"[n], 2, 3, (f"error: {line}",), n) for n in range(2))))
    assert (failure.kind, failure.retry, failure.blamed) == ("host", True, ("a",))


@pytest.mark.slow
def test_a_comparison_takes_less_than_a_twentieth_of_a_step(train, tmp_path):
    """So the default, every 20 steps, takes less than 0.3 % of the time."""
    keys = [*FULL, "layout.gpus_per_node=2", "train.verify_every=1", "train.steps=40", "data.seq_length=256"]
    result = train("llama", {}, *keys)
    assert result.code == 0, result.output
    steps = [line["step_seconds"] for line in result.metrics if line["kind"] == "train"][2:]
    ratio = median(json.loads((tmp_path / "seconds.json").read_text())) / median(steps)
    print(f"{ratio:.4f} of a step, {ratio / 20:.5f} with the default")
    assert ratio < 0.05
