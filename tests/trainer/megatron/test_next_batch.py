"""Batches that are read while the step before is computed are those that are read when a step begins."""

import pytest

VALIDATED = "train.validate_every=7 train.validate_batches=1"


@pytest.mark.parametrize("keys", [VALIDATED, "data.packed=true", f"{VALIDATED} layout.gpus_per_node=2 layout.pp=2"])
def test_losses_are_the_same_over_epochs_and_validations(keys, base, configure, ranks, tmp_path):
    base("llama")
    lines = []
    for command in ("train", "train_reading_ahead"):
        done = ranks(
            command,
            configure("llama", "train.steps=20", f"paths.output={tmp_path / command}", *keys.split()),
        )
        assert not done.code, done.output[-3000:]
        lines.append([(line["kind"], line["step"], line["lm_loss"]) for line in done.metrics if "lm_loss" in line])
    assert lines[0] == lines[1] and len(lines[0]) >= 20
    assert (tmp_path / "train_reading_ahead" / "ahead.txt").read_text() == "20 of 20"
