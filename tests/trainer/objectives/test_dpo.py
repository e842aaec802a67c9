"""trainer/objectives: dpo from rows to a policy that ranks answers it has not seen."""

import json
import math
import shutil
from pathlib import Path

import pytest

from contract.faults import Fault
from trainer.data import references


def steps(result) -> list[dict]:
    return [line for line in result.metrics if line["kind"] == "train"]


def test_the_first_loss_is_that_of_a_coin_and_held_out_pairs_come_out_right_after_some_steps(compared, ranks):
    keys = ["train.steps=40", "train.global_batch=16", "train.micro_batch=8", "train.validate_every=40"]
    run = compared("llama", "dpo", *keys, "train.validate_batches=4", "optimizer.lr=3e-3", "train.dpo_beta=0.5")
    result = ranks("train", run)
    assert result.code == 0, result.output[-3000:]
    first, last = steps(result)[0], steps(result)[-1]
    assert first["lm_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert last["rewards/margin"] > first["rewards/margin"] + 1
    (validation,) = [line for line in result.metrics if line["kind"] == "validation"]
    assert validation["rewards/accuracy"] > 0.9 and "perplexity" not in validation


def test_a_dropout_that_a_release_brings_is_off(compared, ranks, work):
    run = compared("llama", "sure", "train.steps=2")
    unsure = work / "unsure-llama"
    shutil.copytree(run.paths.model, unsure)
    config = json.loads((unsure / "config.json").read_text()) | {"attention_dropout": 0.5}
    (unsure / "config.json").write_text(json.dumps(config))
    result = ranks("train", run.model_copy(update={"paths": run.paths.model_copy(update={"model": str(unsure)})}))
    assert result.code == 0, result.output[-3000:]
    assert steps(result)[0]["lm_loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_killed_it_goes_on_to_the_last_bit(compared, ranks):
    keys = ["train.steps=8", "train.global_batch=8", "checkpoint.save_every=3"]
    whole = ranks("train", compared("llama", "dpo-whole", *keys))
    run = compared("llama", "dpo-killed", *keys)
    assert ranks("train", run, kill_at=5).code == -9
    resumed = ranks("train", run)
    assert resumed.code == 0, resumed.output[-3000:]
    told = ("lm_loss", "rewards/chosen", "rewards/rejected", "rewards/accuracy", "grad_norm")
    found, expected = ([[line[key] for key in told] for line in steps(one)] for one in (resumed, whole))
    assert found == expected


def test_references_of_other_rows_or_another_base_are_refused(compared):
    run = compared("llama", "dpo-refused", "train.global_batch=8")
    references.check(run)
    path = Path(run.paths.reference) / references.MARK
    found = json.loads(path.read_text())
    for key in ("rows", "base"):
        path.write_text(json.dumps(found | {key: "other"}))
        with pytest.raises(
            Fault, match=rf"^paths.reference: .*: was written for another {key} than this run.s; .* again"
        ):
            references.check(run)
    path.unlink()
    with pytest.raises(Fault, match=r"^paths.reference: .*: no references.json; python -m trainer.reference writes it"):
        references.check(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        ("llama", ["", "layout.tp=2 layout.sp=true", "layout.cp=2", "layout.pp=2"]),
        ("glm4-moe", ["layout.ep=2", "layout.pp=2"]),
    ],
)
def test_losses_and_rewards_are_those_of_one_process_at_every_layout(compared, ranks, model, cuts):
    keys = ["train.steps=4", "train.global_batch=8", "train.micro_batch=2", "train.dpo_beta=0.5"]
    told = ("lm_loss", "rewards/chosen", "rewards/rejected", "grad_norm")  # accuracy is by the last bit at first

    def figures(name: str, *cut: str) -> list[list[float]]:
        result = ranks("train", compared(model, f"{model}-dpo-{name}", *keys, *cut))
        assert result.code == 0, result.output[-3000:]
        return [[line[key] for key in told] for line in steps(result)]

    alone = figures("alone")
    for number, cut in enumerate(cuts):
        found = figures(f"cut-{number}", "layout.gpus_per_node=2", *cut.split())
        for step, (one, other) in enumerate(zip(found, alone, strict=True), 1):
            assert one == pytest.approx(other, rel=2e-3, abs=2e-5), (cut, step)
