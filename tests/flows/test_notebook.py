"""examples/finetune.ipynb, cell by cell, in a process whose folder is not the project's."""

import json
import subprocess
import sys

from tests.support.flow_world import ROOT

RETURNED = """
import pickle
from dataclasses import FrozenInstanceError, asdict

kept = finetune.with_options(persist_result=True)("tiny", learning_rate=5e-3, return_state=True)
assert asdict(kept.result()) == asdict(made) | {"name": kept.result().name}
assert pickle.loads(pickle.dumps(made)) == made
try:
    made.model = "other"
except FrozenInstanceError:
    print("RESULT", json.dumps(asdict(made)))
try:
    finetune("tiny", learning_rate=7)
except Exception as error:
    print("ERROR", str(error))
"""


def test_the_notebook_runs_in_any_folder_and_returns_what_was_made(place, first, tmp_path):
    """With the configuration of the pipeline that the session has run: all stages are there."""
    cells = json.loads((ROOT / "examples/finetune.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "below").mkdir()
    environment = place.environment | {"PYTHONPATH": str(ROOT)}
    program = ("import json\n" + code + RETURNED).replace('"tiny"', repr(str(place.conf)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path / "below", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    made = json.loads(line.removeprefix("RESULT "))
    stages = {"download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote"}
    assert made["artifacts"].keys() == stages
    assert all(uri.startswith("s3://finetune/main/") for uri in made["artifacts"].values())
    assert made["tuned"]["held_out/exact_match"] > made["base"]["held_out/exact_match"]
    assert (made["model"], made["version"], made["aliases"]) == ("quick", "1", ["challenger", "champion"])
    assert "against" in made["reason"] and made["mlflow_url"].startswith(place.mlflow)
    assert made["mlflow_run"] in made["mlflow_url"]
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert "optimizer.lr" in error
    assert not [*(tmp_path / "below").iterdir()]
