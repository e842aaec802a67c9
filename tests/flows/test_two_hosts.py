"""A distillation over two hosts, through the flow: both ask the teacher, and both train.

A host is a process group of this one.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.flow_world import states

SHORT = [
    "data.rows=200",
    "data.validation=0.12",
    "evaluate.tasks=[]",
    "train.steps=8",
    "train.validate_every=4",
    "optimizer.warmup_steps=2",
]
DISTILL = ["train.objective=distill", "train.teacher=tiny://qwen3", "train.teacher_top_k=24", "data.loss_on=all"]
TWO = ["layout.nodes=2", "train.micro_batch=8", "gang.start_within=300"]


@pytest.fixture
def made(place, tmp_path):
    """made(name, *overrides) -> what a flow printed, and the folder of its store."""

    def made(name: str, *overrides: str) -> tuple[str, Path]:
        store = tmp_path / name
        places = {"FINETUNE_STORE": str(store), "FINETUNE_RUNS": str(tmp_path / f"{name}-runs")}
        return place.run(*SHORT, *overrides, "--until", "train", within=700, **places), store

    return made


def told(store: Path, kind: str) -> list[dict]:
    (metrics,) = store.glob("train/**/metrics.jsonl")
    return [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == kind]


def answers(store: Path) -> dict[str, np.ndarray]:
    return {path.name: np.load(path) for path in store.glob("reference/**/*.npy")}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_distillation_over_two_hosts_is_that_of_one(made):
    output, two = made("two", *DISTILL, *TWO)
    _, one = made("one", *DISTILL)
    assert {states(output)[stage] for stage in ("convert-teacher", "reference", "train")} == {"Completed"}
    assert "attempt 1: " in output and "reference; logs in" in output and "train; logs in" in output
    found, expected = answers(two), answers(one)
    assert len(found) == 6 and found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype.kind == "i" or np.allclose(array, expected[name], atol=1e-5), name
        assert array.shape == expected[name].shape
    for kind in ("train", "validation"):
        lines, others = told(two, kind), told(one, kind)
        assert [line["step"] for line in lines] == [line["step"] for line in others]
        assert [line["kl"] for line in lines] == pytest.approx([line["kl"] for line in others], rel=1e-3)
    assert told(two, "train")[-1]["kl"] < told(two, "train")[0]["kl"]
