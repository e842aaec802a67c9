"""trainer/training/metrics_files.py: curves that TensorBoard reads, each step once."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_curves_are_the_numbers_of_the_metrics_each_step_once_after_a_kill(configure, base, ranks, work):
    base("llama")
    keys = ["track.tensorboard=true", "train.validate_every=2", "train.validate_batches=1", "checkpoint.save_every=2"]
    run = configure("llama", f"paths.output={work}/curves", *keys)
    assert ranks("train", run, kill_at=5).code == -9
    result = ranks("train", run)
    assert result.code == 0, result.output
    found = EventAccumulator(str(Path(run.paths.output) / "tensorboard")).Reload()
    for kind, name in (("train", "lm_loss"), ("train", "grad_norm"), ("validation", "perplexity")):
        curve = {event.step: event.value for event in found.Scalars(f"{kind}/{name}")}
        metrics = {line["step"]: line[name] for line in result.metrics if line["kind"] == kind}
        assert len(found.Scalars(f"{kind}/{name}")) == len(metrics) and curve == pytest.approx(metrics, rel=1e-6)
