"""Losses, corrections and samplings beside the usual ones, each in a training."""

import json
import shutil
from pathlib import Path

import pytest

ADAPTER = {"adapter.kind": "lora", "adapter.rank": 8, "adapter.targets": "[linear_qkv,linear_proj]"}
SEVERAL = {"reinforce.updates": 2, "reinforce.steps": 2}
RUNS = {
    "dapo": {"reinforce.loss": "dapo", "reinforce.rounds": 3, "reinforce.overlong": 4, "reinforce.clip_high": 0.28},
    "kl": {"reinforce.loss": "dr_grpo", "reinforce.kl": 0.1, "reinforce.correction": "icepop", **ADAPTER},
    "gspo": {"reinforce.loss": "gspo", "reinforce.correction": "sequence_mask", "reinforce.transport": "files"},
    "cispo": {"reinforce.loss": "cispo", "reinforce.temperature": 0.8, "train.micro_batch": 4},
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_and_says_what_it_did(name, finish):
    folder = finish(name, SEVERAL | RUNS[name])
    steps = [line for line in lines(folder) if line["kind"] == "reinforce"]
    assert [line["step"] for line in steps] == [2, 4]
    assert all(line["mismatch"] < 1e-5 for line in steps)
    assert steps[0]["groups_with_signal"] == 1  # so that each of its updates moves the policy
    assert all(line["grad_norm"] > 0 for line in lines(folder) if line["kind"] == "train" and line["step"] <= 2)
    if name == "kl":
        assert steps[0]["kl"] >= 0 and steps[-1]["kl"] > 0  # a policy that has moved
    if name == "dapo":
        assert all(line["drawn"] >= 4 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_release_s_dropout_and_an_adapter_s_are_left_out_of_what_is_compared(finish, work, place):
    unsure = place / "unsure-model"
    shutil.copytree(work / "glm4-moe", unsure)
    config = json.loads((unsure / "config.json").read_text()) | {"attention_dropout": 0.5}
    (unsure / "config.json").write_text(json.dumps(config))
    keys = {"paths.model": unsure, "adapter.dropout": 0.5, "reinforce.steps": 2}  # with one update a step is compared
    folder = finish("unsure", ADAPTER | keys)
    steps = [line for line in lines(folder) if line["kind"] == "reinforce"]
    assert [line["step"] for line in steps] == [1, 2] and all(line["mismatch"] < 1e-5 for line in steps)


REPLIES = """
def reply(prompt, answers, reference):
    return f" {len(answers)} so far " if len(answers) < 3 else None
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packed", [False, True])
def test_an_environment_replies_and_both_sides_read_what_it_said(packed, finish, place):
    (place / "replies.py").write_text(REPLIES)
    keys = {"reinforce.environment": f"{place}/replies.py:reply", "reinforce.turns": 4, "reinforce.max_tokens": 24}
    keys |= {"data.packed": packed, "train.micro_batch": 1 if packed else 8, "data.seq_length": 96}
    keys |= {"data.stop": "e"}  # a model that was never trained says it soon
    folder = finish(f"turns-{packed}", SEVERAL | keys)
    steps = [line for line in lines(folder) if line["kind"] == "reinforce"]
    assert all(line["mismatch"] < 1e-5 for line in steps)  # of tokens behind replies, too
    journal = json.loads((folder / "rollouts" / "000001.json").read_text())
    found = [answer["log_probs"] for group in journal["groups"] for answer in group["answers"]]
    assert any(None in one and one[-1] is not None for one in found)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
