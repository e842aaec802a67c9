"""A tiny mixture-of-experts model, converted, and its data: what every gang here trains."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.load import load
from trainer.data import prepared
from trainer.rehearsal import tiny_models

ROOT = Path(__file__).parents[3]
CONF = """
name: gang
model: {source: made by trainer.tiny}
data: {seq_length: 64, template: "{input} {output}"}
adapter: {rank: 8, alpha: 16}
train: {steps: 40, global_batch: 12, micro_batch: 2, precision: fp32}
optimizer: {lr: 5e-3, warmup_steps: 5}
checkpoint: {save_every: 10}
gang: {start_within: 60}
"""


def wait_for(condition, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def losses(output: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert len(steps) == len({*steps})
    return {line["step"]: line["lm_loss"] for line in lines if line["kind"] == "train"}


def same(found: dict[int, float], expected: dict[int, float], bound: float = 1e-4) -> bool:
    return found.keys() == expected.keys() and all(abs(found[s] - expected[s]) <= bound * expected[s] for s in found)


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gang")
    paths = {"model": "model", "base": "base", "data": "data", "output": "one", "parity": "one/parity.json"}
    text = CONF + "paths: {" + ", ".join(f"{key}: {folder / name}" for key, name in paths.items())
    (folder / "conf.yaml").write_text(text + f", logs: {folder / 'logs'}}}\n")
    tiny_models.make_model("glm4-moe", folder / "model", dtype="float32")
    tiny_models.make_data(folder / "data", rows=64)
    prepared.make(load(folder / "conf.yaml"))
    trainer("convert", str(folder / "conf.yaml"))
    return folder


@pytest.fixture(scope="session")
def alone(work) -> dict[int, float]:
    """Losses of one process."""
    trainer("train", str(work / "conf.yaml"))
    return losses(work / "one")


def trainer(command: str, *arguments: str) -> None:
    line = [sys.executable, "-m", f"trainer.{command}", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
