"""A conversion and a training of two hosts: what Prefect, MLflow and flows.logs show of their gangs."""

import re
import subprocess
import sys

import pytest

from tests.support.flow_world import ROOT, World, states


@pytest.mark.slow
def test_a_run_of_two_hosts_can_be_followed_everywhere(place: World):
    from mlflow import MlflowClient

    own = "train.precision=bf16"  # other tests convert the same model, and this one is to see it done
    wide = ("layout.nodes=2", "convert.hosts=all", "train.micro_batch=8", "train.steps=40")
    output = place.run(*wide, own, "--until", "train")
    assert states(output)["convert"] == states(output)["train"] == "Completed"
    assert len(re.findall(r"convert.*attempt 1: \S+/0, \S+/1 convert; logs in", output)) == 1
    name = place.name_of(output)
    (run,) = place.ask_prefect("flow_runs/filter", flow_runs={"name": {"any_": [name]}})
    found = place.ask_prefect("artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    pages = {one["key"]: one for one in found}
    gang = pages["gang-quick"]
    assert gang["description"] == "done" and gang["task_run_id"]
    assert pages["gang-convert-quick"]["description"] == "done"
    assert "## Hosts: 2\n" in gang["data"] and "| 0 to 40 | 2 |\n" in gang["data"]
    command = next(line for line in gang["data"].splitlines() if line.startswith("python -m flows.logs "))
    assert f"`{command}`" in pages["report-quick"]["data"]

    (trained,) = MlflowClient(place.mlflow).search_runs(["1"], f"attributes.run_name = 'train {name}'")
    assert trained.data.tags["finetune.gang.attempts"] == "1"
    assert trained.data.tags["finetune.gang.hosts"].count("/") == 2

    def logs(*arguments: str) -> str:
        line = [sys.executable, "-m", "flows.logs", *arguments]
        return subprocess.run(line, cwd=ROOT, env=place.environment, capture_output=True, text=True, check=True).stdout

    assert "steps 0 to 40  done\n" in logs()
    assert "step 40/40 " in logs(command.split()[-1], "--tail", "20")
    assert "step 40/40 " in logs("--follow")
