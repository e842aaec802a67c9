"""The flow of a run that exports its adapter alone: evaluated, held to training, registered, with no merged model."""

import os
import re
import subprocess
import sys

import pytest

from tasks.stages.promote import registry
from tests.support.flow_world import CONF, ROOT, states

pytestmark = pytest.mark.slow


def test_an_adapter_alone_is_evaluated_and_promoted(tmp_path):
    conf = CONF.replace("tiny://glm4-moe", "tiny://llama").replace("evaluate: {", "evaluate: {adapter: unmerged, ")
    (tmp_path / "quick.yaml").write_text(f"{conf}export: {{formats: [adapter]}}\n")
    own = {"FINETUNE_RUNS": f"{tmp_path}/runs", "PREFECT_HOME": f"{tmp_path}/prefect", "NO_COLOR": "1"}
    without = {name: value for name, value in os.environ.items() if name not in ("FINETUNE_STORE", "PREFECT_API_URL")}
    command = [sys.executable, "-m", "flows.finetune", f"{tmp_path}/quick.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=without | own, capture_output=True, text=True, timeout=540)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert set(states(said).values()) == {"Completed"}
    assert re.search(r"as trained to step 50: \S+ nats a token apart \(bound 0.001\).* as written and as read", said)
    (version,) = registry(f"sqlite:///{tmp_path}/runs/mlflow.db").search_model_versions("name = 'quick'")
    assert version.source == version.tags["finetune.adapter"]
    assert version.source.endswith("/files/adapter") and "/store/download/" in version.tags["finetune.base"]
    assert not [*(tmp_path / "runs/store/export").rglob("merged")]
