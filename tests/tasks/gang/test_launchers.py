"""Task files of SkyPilot and dstack. docs/how-to/gangs.md says which versions of these programs took them."""

import subprocess

import pytest
import yaml

from conf.schema.named import LAUNCHERS
from flows import gang

SECRETS = {"HF_TOKEN": "hf_secret", "AWS_ACCESS_KEY_ID": "key"}


@pytest.fixture
def written(capsys, monkeypatch):
    """written(launcher, conf, *overrides) -> the file, and the script that each host runs."""
    monkeypatch.setenv("FINETUNE_STORE", "s3://bucket/finetune")
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    def written(launcher: str, conf: str, *overrides: str) -> tuple[dict, str]:
        assert gang.main([conf, "--engine", launcher, *overrides]) == 0
        text = capsys.readouterr().out
        assert not any(value in text for value in SECRETS.values() if value != "key")
        content = yaml.safe_load(text)
        script = content["run"] if launcher == "skypilot" else content["commands"][-1]
        assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
        return content, script

    return written


def test_skypilot_gets_the_hosts_and_gpus_of_the_layout(written):
    content, script = written("skypilot", "glm47", "gang.spares=1")
    assert content["num_nodes"] == 5 and content["resources"]["accelerators"] == "H100:8"
    assert content["secrets"] == {"AWS_ACCESS_KEY_ID": None, "HF_TOKEN": None}
    assert content["envs"] == {"FINETUNE_STORE": "s3://bucket/finetune"} and content["setup"] == "make setup EXTRA=gpu"
    assert "finetune run glm47 gang.spares=1 gang.engine=prefect || code=$?" in script
    assert content["workdir"] == "." and "SKYPILOT_NODE_RANK" in script


def test_dstack_too(written):
    content, script = written("dstack", "llama31-70b", "hardware.gpu=a100")
    assert content["type"] == "task" and content["nodes"] == 2 and content["resources"]["gpu"] == "A100:80GB:8"
    assert content["env"] == ["FINETUNE_STORE=s3://bucket/finetune", "AWS_ACCESS_KEY_ID", "HF_TOKEN"]
    assert "DSTACK_MASTER_NODE_IP" in script and "finetune-nodes" in script


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_configuration_of_the_user_s_travels_in_the_file(launcher, written, tmp_path):
    conf = tmp_path / "mine.yaml"
    conf.write_text("extends: glm47\nname: mine  # it's $mine\n")
    _, script = written(launcher, str(conf))
    (tmp_path / "host").mkdir()
    beginning = script[: script.index("if [")].split("\n", 4)[4]
    subprocess.run(["sh", "-ec", beginning], cwd=tmp_path / "host", check=True)
    assert (tmp_path / "host/conf/own/mine.yaml").read_text() == conf.read_text()
    assert "finetune run mine gang.engine=prefect" in script


@pytest.mark.parametrize("store", ["", "/shared/store"])
def test_a_store_that_hosts_do_not_share_is_refused(store, written, monkeypatch, capsys):
    monkeypatch.setenv("FINETUNE_STORE", store)
    assert gang.main(["glm47", "--engine", "dstack"]) == 2
    assert "FINETUNE_STORE: hosts of dstack share no disk" in capsys.readouterr().err
