"""Training from drawn weights, beside a plain loop of transformers on the same sequences; fp16; batches that grow."""

import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conf.load import dump, load
from conf.rules import batch_ramp
from contract import checkpoints
from contract.faults import Fault
from trainer.data import preparation
from trainer.data.made_texts import stories
from trainer.rehearsal import tiny_models
from trainer.training import resume
from trainer.weights.drawn import files

STEPS = ["train.steps=12", "optimizer.warmup_steps=2", "train.validate_every=12", "checkpoint.save_every=100"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, ranks):
    """drawn(name, keys of config.json, *overrides) -> Run of a drawn, converted model of made-up texts.

    The model is a Llama unless its keys are those of another.
    """
    folder = tmp_path_factory.mktemp("drawn")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    tiny_models.make_tokenizer(tokenizer, 500)
    rows = folder / "texts.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in stories(600, seed=1)))

    def drawn(name: str, keys: dict, *overrides: str):
        llama = tiny_models.KINDS["llama"] | {"tie_word_embeddings": True}
        config = keys if "model_type" in keys else llama | keys
        model = folder / f"model-{len(json.dumps(keys))}"
        if not model.exists():
            files.write(config, tokenizer, model, 1234, lambda done, total: None)
        precise = next((one.partition("=")[2] for one in overrides if one.startswith("train.precision")), "fp32")
        paths = {"model": model, "base": f"{model}-{precise}", "data": folder / "data", "output": folder / name}
        paths |= {"parity": folder / name / "parity.json", "logs": folder / name / "logs"}
        given = [f"paths.{key}={path}" for key, path in paths.items()]
        sources = [f"data.source={rows}", "data.validation=0.1", "model.compare=false", "train.micro_batch=4"]
        asked = {one.partition("=")[0]: one for one in [*given, *sources, *STEPS, *overrides]}
        run = load("tiny-pretrain", [*asked.values()])
        if not Path(run.paths.data).exists():
            preparation.prepare(run, run.data.parts, [None], Path(run.paths.data))
        if not Path(run.paths.base).exists():
            assert ranks("convert", run).code == 0
        return run

    return drawn


def losses(result) -> list[float]:
    return [line["lm_loss"] for line in result.metrics if line["kind"] == "train"]


def plain(run, folder: Path) -> dict:
    dump(run, folder / "run.yaml")
    command = [sys.executable, "-m", "tests.support.plain_pretraining", folder / "run.yaml", folder / "found.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "found.json").read_text())


def test_stages_exchange_unjoined_sequences_of_texts_also_with_data_packed(drawn, ranks):
    """Texts fill their sequences in any case. Only packs of rows are joined (trainer/patches/joined_packs.py)."""
    few = ["train.stop_after=2", "train.validate_every=0", "data.packed=true"]
    alone = ranks("train", drawn("packed", {}, *few))
    stages = ranks("train", drawn("packed-stages", {}, *few, "layout.gpus_per_node=2", "layout.pp=2"))
    assert alone.code == stages.code == 0, stages.output[-2000:]
    assert losses(stages) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_the_loss_of_each_step_is_that_of_a_plain_loop(drawn, ranks, tmp_path):
    run = drawn("fifty", {}, "train.steps=50", "train.validate_every=50")
    result, found = ranks("train", run), plain(run, tmp_path)
    assert result.code == 0, result.output
    assert max(abs(one - other) for one, other in zip(losses(result), found["losses"], strict=True)) < 1e-4


@pytest.mark.slow
def test_the_z_loss_of_each_step_is_that_of_a_plain_loop_at_any_layout(drawn, ranks, tmp_path):
    run = drawn("z", {}, "train.z_loss=0.01")
    alone, found = ranks("train", run), plain(run, tmp_path)
    assert alone.code == 0, alone.output
    assert losses(alone) == pytest.approx(found["losses"], abs=1e-4)
    assert losses(alone)[-1] != pytest.approx(losses(ranks("train", drawn("no-z", {})))[-1], abs=1e-4)
    cut = drawn("z-cut", {}, "train.z_loss=0.01", "layout.gpus_per_node=2", "layout.tp=2")
    together = ranks("train", cut)
    assert together.code == 0, together.output
    for name in ("lm_loss", "z_loss"):
        both = ([line[name] for line in one.metrics if line["kind"] == "train"] for one in (alone, together))
        assert next(both) == pytest.approx(next(both), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four minutes on an idle machine
def test_perplexity_of_a_gpt_of_ten_million_parameters_is_that_of_a_plain_loop(drawn, ranks, tmp_path):
    """Both learn Python from the standard library, begin with the same weights and validate on the same rows."""
    rows = tmp_path / "sources.jsonl"
    sources = [path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    pieces = [text[at : at + 2000] for text in sources[:80] for at in range(0, len(text), 2000)]
    rows.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in dict.fromkeys(pieces)))
    gpt = tiny_models.KINDS["gpt2"] | {"n_layer": 8, "n_embd": 320, "n_head": 5, "initializer_range": 0.02}
    steps = ["train.steps=200", "optimizer.warmup_steps=20", "optimizer.lr=1e-3", "optimizer.min_lr=1e-4"]
    sizes = ["train.global_batch=8", "train.micro_batch=8", "train.validate_every=100", "train.validate_batches=8"]
    run = drawn("ten-million", gpt, f"data.source={rows}", f"paths.data={tmp_path}/sources", *steps, *sizes)
    result, found = ranks("train", run), plain(run, tmp_path)
    assert result.code == 0, result.output
    ours = [line["perplexity"] for line in result.metrics if line["kind"] == "validation"]
    theirs = [math.exp(loss) for loss in found["validations"]]
    print(f"perplexity {ours} beside {theirs}")
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours[1] < ours[0] < math.exp(found["losses"][0]) / 4


@pytest.mark.slow
def test_killed_it_goes_on_to_the_last_bit_and_refuses_another_order(drawn, ranks):
    whole = ranks("train", drawn("whole", {}))
    run = drawn("killed", {}, "checkpoint.save_every=5")
    assert ranks("train", run, kill_at=8).code == -9
    other = run.model_copy(update={"data": run.data.model_copy(update={"seed": 7})})
    with pytest.raises(Fault, match=r"^data.seed: 7, but .* was trained with 1234; set it back"):
        resume.check(other, Path(run.paths.output) / "checkpoints")
    resumed = ranks("train", run)
    assert resumed.code == 0, resumed.output
    assert losses(resumed) == losses(whole)


@pytest.mark.slow
def test_fp16_that_overflows_skips_steps_halves_the_scale_and_goes_on(drawn, ranks):
    run = drawn("fp16", {}, "train.precision=fp16", "train.loss_scale=8192.0")
    result = ranks("train", run)
    assert result.code == 0, result.output
    lines = [line for line in result.metrics if line["kind"] == "train"]
    skipped = lines[-1]["skipped_steps"]
    assert 0 < skipped < 10 and lines[-1]["loss_scale"] == 8192 / 2**skipped
    assert "skipped, loss scale" in result.output and lines[-1]["lm_loss"] < lines[0]["lm_loss"] - 0.1
    assert [("grad_norm" in line) for line in lines].count(False) == skipped


@pytest.mark.slow
def test_steps_that_were_skipped_are_counted_on_after_a_kill_also_where_few_have_a_line(drawn, ranks):
    keys = ["train.precision=fp16", "train.loss_scale=65536.0", "checkpoint.save_every=1", "log.every=5"]
    counts = ("step", "lm_loss", "skipped_steps", "nan_steps", "loss_scale")
    whole = [line for line in ranks("train", drawn("fp16-whole", {}, *keys)).metrics if line["kind"] == "train"]
    run = drawn("fp16-killed", {}, *keys)
    assert ranks("train", run, kill_at=4).code == -9
    resumed = [line for line in ranks("train", run).metrics if line["kind"] == "train"]
    assert [[line[name] for name in counts] for line in resumed] == [[line[name] for name in counts] for line in whole]
    assert whole[0]["step"] == 5 and whole[0]["skipped_steps"] > 1, "some before the kill"


@pytest.mark.slow
def test_batches_that_grow_are_counted_and_resumed_also_at_another_layout(drawn, ranks):
    ramp = ["train.ramp_from=4", "train.ramp_sequences=32", "checkpoint.save_every=2"]
    run = drawn("ramp", {}, *ramp)
    whole = ranks("train", run)
    assert whole.code == 0, whole.output
    lines = [line for line in whole.metrics if line["kind"] == "train"]
    assert [line["samples"] for line in lines] == [batch_ramp.sequences(run.train, step) for step in range(1, 13)]
    assert [line["batch"] for line in lines][:3] == [4, 4, 4] and lines[-1]["batch"] == 16
    assert lines[-1]["lr"] == pytest.approx(run.optimizer.min_lr, rel=1e-3)
    cut = drawn("ramp-cut", {}, *ramp)
    assert ranks("train", cut, kill_at=5).code == -9
    assert checkpoints.complete_steps(Path(cut.paths.output) / "checkpoints")[-1] == 4
    two = cut.model_copy(update={"layout": cut.layout.model_copy(update={"gpus_per_node": 2, "tp": 2})})
    resumed = ranks("train", two)
    assert resumed.code == 0, resumed.output
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-4)
