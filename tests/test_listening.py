"""No command, nor any of its processes, ever listens beyond this host (docs/reference/network.md)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.listening import Listening, listening

ROOT = Path(__file__).parents[1]
TWO_RANKS = ("layout.gpus_per_node=2", "train.micro_batch=8")
SHORT = ("train.steps=4", "optimizer.warmup_steps=1", "train.validate_every=4", "checkpoint.save_every=4")


@pytest.fixture
def seen(tmp_path):
    with listening() as seen:
        seen.environment |= {"FINETUNE_RUNS": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FINETUNE_STORE"):
            seen.environment.pop(name, None)
        yield seen


def run(seen: Listening, *command: str, within: float = 540) -> str:
    arguments = [sys.executable, "-m", *command]
    done = subprocess.run(arguments, cwd=ROOT, env=seen.environment, capture_output=True, text=True, timeout=within)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one rank", "two ranks"])
def test_preflight_which_starts_ranks_as_every_command_does(seen, ranks, tmp_path):
    keys = [f"paths.{name}={tmp_path / name}" for name in ("output", "logs")]
    run(seen, "trainer.preflight", "tiny", *keys, *ranks)
    assert seen.at and not seen.exposed(), seen.exposed()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("conf, keys", [("tiny", ()), ("tiny-rl", ("reinforce.steps=2",))], ids=["tiny", "tiny-rl"])
def test_a_flow(seen, conf, keys, ranks):
    run(seen, "flows.finetune", conf, *SHORT, *keys, *ranks)
    assert any("prefect" in line for line in seen.at.values()), seen.at
    assert any("trainer.train" in line for line in seen.at.values()), seen.at
    assert not seen.exposed(), seen.exposed()


@pytest.mark.slow
def test_servers_and_workers_of_make_up(seen):
    try:
        run(seen, "flows.services", "up")
        seen.look()
    finally:
        run(seen, "flows.services", "down")
    lines = " ".join(seen.at.values())
    assert "prefect" in lines and "mlflow" in lines, seen.at
    assert not seen.exposed(), seen.exposed()
