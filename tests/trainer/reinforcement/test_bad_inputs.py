"""What a person gives wrongly ends the command with one line, and code of theirs reaches nothing on its way there."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from contract.faults import Fault
from trainer.patches import versions, vllm_cpu

SOURCE = """
import os, socket
def raises(prompt, answer, reference):
    raise ValueError("no such answer")
def endless(prompt, answer, reference):
    while True: pass
def harms(prompt, answer, reference):
    ways = {{
        "fork": os.fork,
        "write": lambda: open("{place}/written", "w"),
        "read what the trainer was told": lambda: open(f"/proc/{{os.getppid()}}/environ"),
        "end the trainer": lambda: os.kill(os.getppid(), 9),
        "reach the network": lambda: socket.create_connection(("127.0.0.1", {port})),
    }}
    done = [name for name in os.environ if "AWS" in name]
    for name, way in ways.items():
        try:
            way()
            done.append(name)
        except PermissionError:
            pass
    raise ValueError(f"it could {{', '.join(done) or 'do nothing'}}")
"""
OF_FUNCTIONS = {
    "raises": "ValueError: no such answer",
    "endless": "no end within 0.5 s (reinforce.reward_seconds)",
    "harms": "ValueError: it could do nothing",
}


@pytest.fixture
def said(forked, place):
    """said(name, overrides, **environment) -> the one line that a command ends with."""

    def said(name: str, overrides: dict[str, object], **environment: str) -> str:
        process, _ = forked(name, {"reinforce.steps": 4} | overrides, **environment)
        output = place / f"{name}.log"
        assert process.wait(300) == 2, output.read_text()[-4000:]
        (line,) = [one for one in output.read_text().splitlines() if one.startswith("error: ")]
        assert output.read_text().splitlines()[-1] == line and "Traceback" not in output.read_text()
        return line

    return said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_a_reward_that_does_what_it_may_not_is_one_line_and_has_done_nothing(name, said, place):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        (place / "rewards.py").write_text(SOURCE.format(place=place, port=server.getsockname()[1]))
        keys = {"reinforce.reward": "function", "reinforce.function": f"{place}/rewards.py:{name}"}
        keys |= {"reinforce.pattern": "null", "reinforce.reward_seconds": 0.5 if name == "endless" else 20.0}
        line = said(name, keys, AWS_SECRET_ACCESS_KEY="secret")
        assert line.startswith("error: reinforce.reward: function: for the answer ") and OF_FUNCTIONS[name] in line
        with pytest.raises(TimeoutError):
            server.accept()
    assert not (place / "written").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prompt_that_leaves_no_room_is_told_before_anything_is_sampled(said, place):
    line = said("long", {"reinforce.max_tokens": 60})
    assert "training.jsonl:1: a prompt of " in line and line.endswith("leaves 4")
    assert not list((place / "long" / "rollouts").glob("0*.json"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tokenizer_of_another_model_is_told_before_vllm_starts(said, work, rows, tmp_path, place):
    shutil.copytree(work / "glm4-moe", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 100}))
    line = said("tokenizer", {"paths.model": tmp_path / "model"})
    assert "does not fit the model, whose vocab_size is 100" in line
    assert not (place / "tokenizer-logs" / "rollout.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rewards_that_are_all_equal_end_the_run_after_so_many_steps(said, place):
    line = said("equal", {"reinforce.pattern": "there is no such answer", "reinforce.patience": 2})
    assert "for 2 steps, all answers to each prompt got the same reward (the last ones 0)" in line
    assert len(list((place / "equal" / "rollouts").glob("0*.json"))) == 2


def another(version: str, folder: Path) -> str:
    """A folder in which Python finds vLLM's distribution with another version, before the one that is installed."""
    for name in ("vllm", "vllm-cpu"):
        found = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        found.mkdir()
        (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_of_another_vllm_is_refused(said, tmp_path):
    line = said("another", {}, PYTHONPATH=another("0.25.1", tmp_path))
    assert line.startswith("error: rollout: start: vllm") and " 0.25.1: " in line and "is written for 0.26.0" in line


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_another_vllm_is_refused_whichever_it_is(distribution, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: "0.25.1" if name == distribution else None)
    with pytest.raises(Fault, match=f"^{distribution} 0.25.1: trainer/patches/vllm_cpu.py is written for 0.26.0"):
        vllm_cpu.require_known()
