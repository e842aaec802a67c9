"""The flow from the Hub, which a stand-in plays over HTTP: a branch is pinned once, and a moved branch is noticed.

Rows come from a private data set there and from S3.
"""

import json
from pathlib import Path

import boto3
import pytest

from tests.support import stand_in_hub
from tests.support.flow_world import states
from trainer.rehearsal import tiny_models


@pytest.fixture
def hub(tmp_path):
    with stand_in_hub.serve(tmp_path / "hub") as server:
        yield server


def test_a_model_of_the_hub_at_its_commit(place, hub, tmp_path):
    hub.tokens[place.environment["HF_TOKEN"]] = set()
    own = {"FINETUNE_STORE": str(tmp_path / "store"), "FINETUNE_RUNS": str(tmp_path / "runs"), "HF_ENDPOINT": hub.url}
    tiny_models.make_model("glm4-moe", tmp_path / "model", dtype="float32")
    commit = hub.publish("models/org/tiny", tmp_path / "model")
    assert states(place.run("model.source=org/tiny", "--until", "download", **own))["download"] == "Completed"
    (record,) = (tmp_path / "store/download").glob("*/artifact.json")
    assert commit in record.read_text()
    assert "miss" not in place.run("model.source=org/tiny", "--until", "download", "--dry-run", **own)

    (tmp_path / "model/generation_config.json").write_text("{}")
    moved = hub.publish("models/org/tiny", tmp_path / "model")
    output = place.run("model.source=org/tiny", "--until", "download", "--dry-run", **own)
    assert f'commit: "{commit}" -> "{moved}"' in output
    pinned = place.run("model.source=org/tiny", f"model.revision={commit}", "--until", "download", "--dry-run", **own)
    assert "miss" not in pinned


def test_rows_of_a_private_data_set_and_of_s3(place, hub, tmp_path):
    def rows(name: str, count: int) -> Path:
        path = tmp_path / name / "train.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"q": f"{name} {i}", "a": "yes"}) + "\n" for i in range(count)))
        return path

    hub.tokens[place.environment["HF_TOKEN"]] = {"datasets/org/rows"}
    commit = hub.publish("datasets/org/rows", rows("hub", 60).parent, private=True)
    names = {f"aws_{key}": place.environment[f"AWS_{key.upper()}"] for key in ("access_key_id", "secret_access_key")}
    client = boto3.client("s3", endpoint_url=place.environment["AWS_ENDPOINT_URL"], region_name="us-east-1", **names)
    client.upload_file(str(rows("s3", 40)), "finetune", "rows/of/s3/train.jsonl")
    client.close()

    own = {"FINETUNE_STORE": str(tmp_path / "store"), "FINETUNE_RUNS": str(tmp_path / "runs"), "HF_ENDPOINT": hub.url}
    columns = "input: q, output: a"
    parts = f"{{source: org/rows, weight: 3, {columns}}}, {{source: 's3://finetune/rows/of', {columns}}}"
    asked = ["data.source=null", f"data.mixture=[{parts}]", "--until", "prepare"]
    assert states(place.run(*asked, **own))["prepare"] == "Completed"
    (record,) = (tmp_path / "store/prepare").glob("*/artifact.json")
    made = json.loads(record.read_text())
    first, second = made["stage"]["config"]["sources"]
    assert first["commit"] == commit and second["objects"][0][0] == "s3/train.jsonl"
    assert (made["result"]["rows_read"], made["result"]["rows_kept"]) == (100, 80)
    assert states(place.run(*asked, **own))["prepare"] == "Cached"
