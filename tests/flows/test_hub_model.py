"""The flow from the Hub, which a stand-in plays over HTTP: a branch is pinned once, and a moved branch is noticed."""

import subprocess
import sys

import pytest

from tests import stand_in_hub
from tests.flows.world import ROOT, states


@pytest.fixture
def hub(tmp_path):
    tiny = [sys.executable, "-m", "trainer.tiny", "glm4-moe", tmp_path / "model", "--dtype", "float32"]
    subprocess.run(tiny, cwd=ROOT, check=True)
    with stand_in_hub.serve(tmp_path / "hub") as server:
        yield server


def test_a_model_of_the_hub_at_its_commit(place, hub, tmp_path):
    hub.tokens[place.environment["HF_TOKEN"]] = set()
    own = {"FINETUNE_STORE": str(tmp_path / "store"), "FINETUNE_RUNS": str(tmp_path / "runs"), "HF_ENDPOINT": hub.url}
    commit = hub.publish("models/org/tiny", tmp_path / "model")
    assert states(place.run("model.source=org/tiny", "--until", "convert", **own))["convert"] == "Completed"
    (record,) = (tmp_path / "store/download").glob("*/artifact.json")
    assert commit in record.read_text()
    assert "miss" not in place.run("model.source=org/tiny", "--until", "convert", "--dry-run", **own)

    (tmp_path / "model/generation_config.json").write_text("{}")
    moved = hub.publish("models/org/tiny", tmp_path / "model")
    output = place.run("model.source=org/tiny", "--until", "convert", "--dry-run", **own)
    assert f'commit: "{commit}" -> "{moved}"' in output
    pinned = place.run("model.source=org/tiny", f"model.revision={commit}", "--until", "convert", "--dry-run", **own)
    assert "miss" not in pinned
