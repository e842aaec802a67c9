"""trainer/training/validations.py: a training that gets worse ends, and its best checkpoint stays and is exported."""

import json
from pathlib import Path

import pytest

from conf.load import ConfigError, load
from contract import checkpoints

WORSE = ["train.steps=12", "train.validate_every=1", "train.validate_batches=1", "checkpoint.save_every=1"]
WORSE += ["optimizer.lr=0.3", "optimizer.clip_grad=0", "train.stop_after_worse=3"]
BEST = ["checkpoint.keep=1", "checkpoint.keep_best=true"]


def validated(result) -> dict[int, float]:
    return {line["step"]: line["lm_loss"] for line in result.metrics if line["kind"] == "validation"}


@pytest.fixture(scope="module")
def ended(configure, base, ranks, work):
    base("llama")
    run = configure("llama", f"paths.output={work}/worse", f"paths.parity={work}/worse/parity.json", *WORSE, *BEST)
    result = ranks("train", run)
    assert result.code == 0, result.output
    return run, result


def test_a_training_that_gets_worse_ends_and_keeps_its_best_checkpoint(ended, ranks):
    run, result = ended
    losses = validated(result)
    best, last = min(losses, key=losses.__getitem__), max(losses)
    assert (last, len(losses)) == (best + 3, last) and last < 12
    folder = Path(run.paths.output)
    assert checkpoints.complete_steps(folder / "checkpoints") == [best, last]
    assert [json.loads((folder / f"parity{name}.json").read_text())["step"] for name in ("-best", "")] == [best, last]
    again = ranks("train", run)
    assert "already exists" in again.output and again.metrics == result.metrics


def test_the_best_checkpoint_is_exported_and_compared_with_its_own_record(ended, configure, ranks, work):
    run, result = ended
    best = min(validated(result), key=validated(result).__getitem__)
    paths = [f"paths.{key}={getattr(run.paths, key)}" for key in ("output", "parity")]
    asked = configure("llama", *paths, f"paths.export={work}/best", "export.checkpoint=best", *WORSE, *BEST)
    exported = ranks("export", asked)
    assert exported.code == 0, exported.output
    mark = json.loads((work / "best" / "complete.json").read_text())
    record = json.loads((Path(run.paths.output) / "parity-best.json").read_text())
    assert mark["step"] == record["step"] == best
    assert mark["trained"]["weights"] == record["weights"]


def test_killed_it_counts_on(ended, configure, ranks, work):
    _, result = ended
    last = max(validated(result))
    run = configure("llama", f"paths.output={work}/worse-killed", *WORSE, *BEST)
    assert ranks("train", run, kill_at=last - 1).code == -9
    resumed = ranks("train", run)
    assert resumed.code == 0, resumed.output
    assert validated(resumed) == validated(result)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["train.stop_after_worse=2"], "train.stop_after_worse: counts validations, but train.validate_every is 0"),
        (["checkpoint.keep_best=true"], "checkpoint.keep_best: needs validations, but train.validate_every is 0"),
        (
            ["checkpoint.keep_best=true", "train.validate_every=4", "checkpoint.save_every=6"],
            "checkpoint.save_every: 6 is not a multiple of train.validate_every 4",
        ),
        (["export.checkpoint=best"], "export.checkpoint: best, but checkpoint.keep_best is false"),
    ],
)
def test_what_goes_with_no_validation_is_one_line(work, changes, says):
    with pytest.raises(ConfigError) as refused:
        load(work / "conf.yaml", changes)
    assert says in str(refused.value) and "\n" not in str(refused.value).strip()
