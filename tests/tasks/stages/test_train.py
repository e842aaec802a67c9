"""tasks/stages/train.py: what a training is found by again."""

import json

import pytest

from conf.load import load
from conf.model_files.quantization import OF_TINY
from conf.planner import verdict
from conf.schema import identity
from tasks.gang.job import Training
from tasks.run.artifact import Stage
from tasks.run.launch import Broken
from tasks.sources import released_config
from tasks.stages import train


def fingerprint(conf: str, *overrides: str) -> str:
    inputs = (Stage(name, 1, {}, {}) for name in ("convert", "prepare"))
    return train.stage(load(conf, overrides), *inputs).fingerprint


@pytest.mark.parametrize(
    ("conf", "overrides", "made"),
    [
        ("tiny", (), "8b5c29a5fb4fc098"),
        ("tiny", ("adapter.kind=none",), "6023e0990a9e587b"),
        ("tiny", ("optimizer.lr=0.01", "train.stop_after=1"), "c1c5d18731116c5d"),
        ("tiny", ("adapter.experts=shared",), "dc2a1ac7d19dd1a7"),
        ("llama31-70b", ("adapter.kind=none",), "98d2b28d357d3643"),
        ("llama31-405b", ("train.fp8=current",), "1cc527040ec7070b"),
    ],
)
def test_what_was_trained_before_is_found_again(conf, overrides, made, monkeypatch):
    """Fingerprints of version 4906b5a: an edit that changes one throws away what others have paid for.

    Those of tiny are younger: its experts are balanced.
    """
    monkeypatch.setattr(released_config, "read", lambda run: verdict.config_of(run)[0])
    assert fingerprint(conf, *overrides) == made


@pytest.mark.parametrize(
    ("source", "base", "before"),
    [
        ("tiny://llama-fp8", "fp8", True),  # in blocks of 32 x 32
        ("tiny://llama-fp8", "int4", True),
        ("tiny://llama", "fp8", True),
        ("tiny://llama-nvfp4", "nvfp4", False),  # gate and up had two factors
        ("fp8", "fp8", False),
        ("int4", "int4", False),
        ("int4", "nvfp4", False),
    ],
)
def test_what_was_trained_on_rounded_codes_of_a_release_is_not_taken_for_what_is(source, base, before, tmp_path):
    """And nothing else is made again: the keys alone say what it is."""
    if "://" not in source:
        described = OF_TINY[source] | ({"weight_block_size": [128, 128]} if source == "fp8" else {})
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described, "dtype": "bfloat16"}))
        source = str(tmp_path)
    run = load("tiny", [f"model.source={source}", f"model.base={base}"])
    asked = train.stage(run, *(Stage(name, 1, {}, {}) for name in ("convert", "prepare")))
    assert (asked.config == identity.of(run, "train")) == before


def test_a_layout_is_no_part_of_it():
    cut = ("layout.gpus_per_node=4", "layout.tp=2", "layout.sp=true", "layout.ep=2", "train.micro_batch=8")
    for experts in ("adapter.experts=each", "adapter.experts=shared"):
        assert fingerprint("tiny", experts, *cut) == fingerprint("tiny", experts)


def test_a_training_that_was_told_to_end_from_outside_is_no_whole_one(tmp_path):
    """It saves a checkpoint, and leaves with code 0: after 2 of 50 steps it was stored as a trained model."""
    run = load("tiny", ["train.steps=50", f"paths.output={tmp_path}"])

    def save(step: int) -> None:
        mark = tmp_path / f"checkpoints/iter_{step:07d}/complete.json"
        mark.parent.mkdir(parents=True)
        mark.write_text(json.dumps({"files": {}}))

    save(2)
    with pytest.raises(Broken, match="ended from outside at step 2 of 50; it can resume there"):
        train.require_done(Training(run))
    save(50)
    train.require_done(Training(run))
