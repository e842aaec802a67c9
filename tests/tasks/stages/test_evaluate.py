"""tasks/stages/evaluate.py: what is asked is what the fingerprint says."""

from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from tasks.run.artifact import Stage
from tasks.stages import evaluate, export


@pytest.mark.parametrize("edited", ["sums.yaml", "sums.jsonl"])
def test_a_task_file_that_is_edited_while_the_run_goes_on_is_refused(edited, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 1"}\n{"question": "2 + 3"}\n')
    (tmp_path / "sums.yaml").write_text(
        f"task: sums\ndataset_kwargs: {{data_files: {{test: {tmp_path}/sums.jsonl}}}}\n"
    )
    run = load("tiny", [f"evaluate.tasks=[held_out, {tmp_path}/sums.yaml]"])
    asked = evaluate.stage(run, Stage("download", 1), Stage("prepare", 1)).config["task_files"]
    evaluate.require_unchanged(asked)
    with Path(tmp_path / edited).open("a") as file:
        file.write("\n")
    with pytest.raises(
        Fault, match=r"^evaluate\.tasks: .*/sums\.yaml: it or its data have changed since the run began"
    ):
        evaluate.require_unchanged(asked)


MODEL, DATA, TRAINED, BEFORE = (Stage(name, 1) for name in ("export", "prepare", "train", "evaluate"))


def test_the_base_s_evaluation_is_an_input_where_weights_are_rounded_and_nowhere_else():
    rounded = load("tiny", ["evaluate.quantization=fp8", "evaluate.precision=bf16"])
    assert "before" not in evaluate.stage(load("tiny"), MODEL, DATA, TRAINED, BEFORE).inputs
    assert "before" not in evaluate.stage(rounded, MODEL, DATA).inputs
    assert evaluate.stage(rounded, MODEL, DATA, TRAINED, BEFORE).inputs["before"] == BEFORE.fingerprint


def test_a_packed_base_has_an_evaluation_of_its_own_which_the_tuned_model_is_held_to():
    """One of a run in bf16 would be found again, and has not left what the base says of the prompts."""
    plain, packed = load("tiny"), load("tiny", ["model.base=int4"])
    assert evaluate.stage(plain, MODEL, DATA).fingerprint != evaluate.stage(packed, MODEL, DATA).fingerprint
    assert evaluate.stage(packed, MODEL, DATA, TRAINED, BEFORE).inputs["before"] == BEFORE.fingerprint


def test_a_merge_onto_packed_weights_is_held_to_training_alone_and_shares_the_base_s_evaluation():
    packed, onto = (load("tiny", ["model.base=int4", f"export.merge_onto={to}"]) for to in ("released", "packed"))
    assert evaluate.stage(packed, MODEL, DATA).fingerprint == evaluate.stage(onto, MODEL, DATA).fingerprint
    assert "before" not in evaluate.stage(onto, MODEL, DATA, TRAINED, BEFORE).inputs
    assert export.stage(packed, MODEL, TRAINED).fingerprint != export.stage(onto, MODEL, TRAINED).fingerprint


def test_runs_of_one_base_share_its_evaluation_however_the_tuned_model_is_served():
    merged, beside = load("tiny"), load("tiny", ["evaluate.adapter=unmerged"])
    assert evaluate.stage(merged, MODEL, DATA).fingerprint == evaluate.stage(beside, MODEL, DATA).fingerprint
    tuned = [evaluate.stage(run, MODEL, DATA, TRAINED, BEFORE).fingerprint for run in (merged, beside)]
    assert tuned[0] != tuned[1]
