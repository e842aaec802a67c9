"""tasks/stages/evaluate.py: what is asked is what the fingerprint says."""

from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from tasks.run.artifact import Stage
from tasks.stages import evaluate


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
