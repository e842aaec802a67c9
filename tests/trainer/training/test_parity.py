"""What training says of fixed prompts does not depend on the layout, and is there whenever training is complete."""

import json
import math
from pathlib import Path

import pytest

from trainer.weights import digests


def recorded(run) -> dict:
    return json.loads(Path(run.paths.parity).read_text())


def log_probs(found: dict, key: str = "log_probs") -> list[float]:
    return [value for row in found["rows"] for value in row[key]]


def numbers(result) -> list[dict]:
    return [{key: line.get(key) for key in ("step", "lm_loss", "aux_loss", "grad_norm")} for line in result.metrics]


@pytest.fixture(scope="module")
def trained(configure, ranks, base, work):
    """trained(name, *overrides) -> a run after six steps of training"""
    base("glm4-moe")

    def trained(name: str, *overrides: str):
        output = work / "parity" / name
        mine = [f"paths.output={output}", f"paths.parity={output}/parity.json"]
        run = configure("glm4-moe", *mine, *overrides)
        result = ranks("train", run)
        assert result.code == 0, result.output
        return run, result

    return trained


@pytest.fixture(scope="module")
def single(trained):
    return trained("single")


def test_recording_changes_no_number_of_training(single, trained):
    _, recording = single
    without, result = trained("without", "evaluate.parity_rows=0")
    assert numbers(result) == numbers(recording)
    assert not Path(without.paths.parity).exists()


@pytest.mark.slow
def test_deleted_or_of_other_prompts_it_is_made_again(single, trained):
    run, _ = single
    before = recorded(run)
    Path(run.paths.parity).unlink()
    trained("single")
    assert recorded(run) == before
    _, result = trained("single", "evaluate.parity_rows=3")
    assert "log-probabilities of 3 prompts" in result.output
    assert [row["tokens"] for row in recorded(run)["rows"]] == [row["tokens"] for row in before["rows"][:3]]
    _, result = trained("single", "evaluate.parity_rows=3")
    assert "log-probabilities" not in result.output
    trained("single")
    assert recorded(run) == before


def test_tokens_are_those_of_training(single, work):
    found = recorded(single[0])
    assert [len(row["tokens"]) - 1 for row in found["rows"]] == [len(row["log_probs"]) for row in found["rows"]]
    assert len(found["rows"]) == 6  # of eight rows for validation, two are longer than a sequence
    assert max(len(row["tokens"]) for row in found["rows"]) <= 64
    assert all(value < 0 and math.isfinite(value) for value in log_probs(found))
    assert found["step"] == 6


def test_what_the_adapter_does_is_written_beside(single):
    """The base's answers, without the adapter; and a digest of the weights that answered."""
    run, _ = single
    found = recorded(run)
    with_adapter, without = log_probs(found), log_probs(found, "base_log_probs")
    assert len(with_adapter) == len(without)
    assert sum(abs(a - b) for a, b in zip(with_adapter, without, strict=True)) / len(without) > 0.1
    checkpoint = Path(run.paths.output) / "checkpoints/iter_0000006"
    assert found["weights"] == digests.of_all(digests.read(checkpoint)["digests"])


@pytest.mark.parametrize(
    "layout", ["tp=2 sp=true ep=2", "pp=2 vpp=2", "cp=2", pytest.param("ep=2", marks=pytest.mark.slow)]
)
def test_the_layout_changes_nothing(layout, single, configure, ranks, work):
    """The run is finished: it loads its last checkpoint at this layout and takes no step."""
    run, result = single
    cut = [f"layout.{pair}" for pair in layout.split()]
    parity = work / "parity" / f"{layout}.json"
    paths = [f"paths.output={run.paths.output}", f"paths.parity={parity}"]
    again = ranks("train", configure("glm4-moe", *paths, "layout.gpus_per_node=2", *cut))
    assert again.code == 0, again.output
    assert again.metrics == result.metrics
    before, after = recorded(run), json.loads(parity.read_text())
    for key in ("log_probs", "base_log_probs"):
        one, two = log_probs(before, key), log_probs(after, key)
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4
    assert after["weights"] == before["weights"]  # to the last bit, as loaded at this layout
