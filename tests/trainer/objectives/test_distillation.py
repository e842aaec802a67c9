"""trainer/objectives: distillation, beside a plain loop of transformers on the same rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import dump
from trainer.data.tickets import tickets

ROWS = 16  # all of them in each step, so that their order has no meaning


@pytest.fixture(scope="session")
def taught(work, configure, base, ranks):
    """taught(name, *overrides) -> Run of a Qwen3 whose teacher, of another family, has been asked."""
    folder = work / "few-tickets"
    folder.mkdir()
    rows = [json.dumps({"input": ask, "output": team}) + "\n" for ask, team in tickets(2 * ROWS, seed=0).items()]
    (folder / "training.jsonl").write_text("".join(rows[:ROWS]))
    (folder / "validation.jsonl").write_text("".join(rows[ROWS:]))

    def taught(name: str, *overrides: str):
        base("qwen3")
        base("mistral")
        paths = {"data": folder, "output": work / name, "reference": work / f"{name}-reference"}
        paths |= {"teacher": work / "mistral", "teacher_base": work / "mistral-base"}
        keys = {f"paths.{key}": path for key, path in paths.items()}
        keys |= {"train.objective": "distill", "train.teacher": "tiny://mistral", "train.teacher_top_k": 24}
        keys |= {"data.loss_on": "all", "train.global_batch": ROWS, "train.micro_batch": 8, "adapter.kind": "none"}
        keys |= dict(one.split("=", 1) for one in overrides)
        run = configure("qwen3", *(f"{key}={value}" for key, value in keys.items()))
        Path(run.paths.reference).mkdir(exist_ok=True)
        result = ranks("reference", run)
        assert result.code == 0, result.output[-3000:]
        return run

    return taught


def steps(result) -> list[dict]:
    return [line for line in result.metrics if line["kind"] == "train"]


def test_the_loss_of_each_step_is_that_of_a_plain_loop(taught, ranks, tmp_path):
    keys = ["train.steps=12", "train.validate_every=12", "train.validate_batches=1", "train.distill_temperature=2.0"]
    run = taught("distilled", *keys)
    result = ranks("train", run)
    assert result.code == 0, result.output[-3000:]
    dump(run, tmp_path / "run.yaml")
    command = [sys.executable, "-m", "tests.support.plain_distillation", tmp_path / "run.yaml", tmp_path / "found.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    ours, plain = (
        [line["lm_loss"] for line in steps(result)],
        json.loads((tmp_path / "found.json").read_text())["losses"],
    )
    assert max(abs(one - other) for one, other in zip(ours, plain, strict=True)) < 1e-4
    assert ours[-1] < ours[0]
    assert all(line["kl"] == pytest.approx(line["lm_loss"] / 4, rel=1e-5) for line in steps(result))
    (validation,) = [line for line in result.metrics if line["kind"] == "validation"]
    assert validation["kl"] < steps(result)[0]["kl"] and "perplexity" not in validation


@pytest.mark.slow
def test_losses_are_those_of_one_process_at_every_layout_and_after_a_kill(taught, ranks):
    def losses(name: str, *cut: str, kill_at: int | None = None) -> list[float]:
        run = taught(f"distilled-{name}", "train.steps=4", "train.micro_batch=2", *cut)
        if kill_at:
            assert ranks("train", run, kill_at=kill_at).code == -9
        result = ranks("train", run)
        assert result.code == 0, result.output[-3000:]
        return [line["lm_loss"] for line in steps(result)]

    alone = losses("alone")
    assert losses("killed", "checkpoint.save_every=1", kill_at=2) == alone
    for number, cut in enumerate(["", "layout.tp=2 layout.sp=true", "layout.cp=2", "layout.pp=2"]):
        assert losses(f"cut-{number}", "layout.gpus_per_node=2", *cut.split()) == pytest.approx(alone, rel=1e-4), cut


@pytest.mark.slow
def test_the_command_asks_a_teacher_by_itself(taught, tmp_path):
    """The other tests ask in processes that have Megatron already, in front of which tokenizers hide torch."""
    given = taught("by-hand", "train.steps=4")
    paths = given.paths.model_copy(update={"reference": str(tmp_path / "reference"), "logs": str(tmp_path / "logs")})
    dump(given.model_copy(update={"paths": paths}), tmp_path / "run.yaml")
    command = [sys.executable, "-m", "trainer.reference", tmp_path / "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in Path(given.paths.reference).glob("*.npy")} == {
        path.name for path in Path(paths.reference).glob("*.npy")
    }
