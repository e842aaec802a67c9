"""trainer/training/resume.py: a checkpoint knows what it is of, and a resume says what differs and what may. No
Megatron."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from conf.schema import identity
from contract import checkpoints
from contract.faults import Fault
from trainer.training import resume
from trainer.weights import digests

ROOT = Path(__file__).parents[3]
KEYS = identity.recorded(load("tiny")).keys()
FREE = {key for key in KEYS if identity.may_change(key)}
HELD = KEYS - FREE


@pytest.fixture
def run(tmp_path):
    """Of a run with a complete checkpoint, of step 3."""
    base(tmp_path / "base", "a" * 64)
    tokens(tmp_path / "data", "b" * 64)
    run = configure(tmp_path)
    save(run)
    return run


def configure(folder: Path, *overrides: str):
    paths = [f"paths.{key}={folder / key}" for key in ("base", "data", "output")]
    return load("tiny", [*paths, *overrides])


def base(folder: Path, digest: str, **facts) -> None:
    folder.mkdir(exist_ok=True)
    checkpoints.mark(folder, **({"digest": digest, "precision": "fp32", "mtp": True} | facts))


def tokens(folder: Path, digest: str, **others: str) -> None:
    """What trainer.prepare leaves, as far as it says which tokens there are."""
    folder.mkdir(exist_ok=True)
    sums = {"training.idx.parquet": digest, "training.jsonl": "c" * 64, "validation.jsonl": "d" * 64} | others
    files = {name: {"size": 1, "sha256": sha256} for name, sha256 in sums.items()}
    rows = {"training": 8, "validation": 4, "test": 0}
    facts = {"kind": "sft", "files": files, "settings": {}, "sources": [], "tokenizer": "", "rows": rows}
    facts["sequences"] = rows
    (folder / "prepared.json").write_text(json.dumps(facts | {"vocab_size": 512, "pad_id": 0}))


def checkpoint(run, step: int = 3) -> Path:
    return checkpoints.step_folder(Path(run.paths.output) / "checkpoints", step)


def save(run, **changes) -> None:
    checkpoint(run).mkdir(parents=True, exist_ok=True)
    checkpoints.mark(checkpoint(run), step=3, training=resume.record(run) | changes)


def check(run) -> None:
    folder = Path(run.paths.output) / "checkpoints"
    resume.check(run, folder)
    resume.check_data(run, folder)


def test_a_run_goes_on_from_its_own_checkpoint_and_from_none(run, tmp_path):
    check(run)
    shutil.rmtree(checkpoint(run))
    check(configure(tmp_path, "adapter.rank=4"))


def other(value):
    """Another value of the same kind, as a configuration might have had it."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[:-1] if isinstance(value, list) and value else f"other than {value}"


def test_losses_of_an_earlier_version_are_not_mixed_with_those_of_this_one(run, tmp_path):
    config = json.dumps({"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    own = run.model_copy(update={"paths": run.paths.model_copy(update={"model": str(tmp_path / "model")})})
    with pytest.raises(Fault, match="by an earlier version of this program, whose losses of routers and of MTP"):
        check(own)
    save(own)
    check(own)
    without = {"moe": own.moe.model_copy(update={"balance": "none"})}
    without["model"] = own.model.model_copy(update={"mtp_loss_scale": 0.0})
    save(own.model_copy(update=without), auxiliary_losses={})
    check(own.model_copy(update=without))


@pytest.mark.parametrize("key", sorted(HELD))
def test_a_checkpoint_of_another_value_is_refused_by_its_key(key, run):
    keys = identity.recorded(run)
    save(run, keys=keys | {key: other(keys[key])})
    with pytest.raises(Fault) as refused:
        check(run)
    now, was = json.dumps(keys[key]), json.dumps(other(keys[key]))
    assert str(refused.value).startswith(f"{key}: {now}, but {checkpoint(run)} was trained with {was}; set it back, or")
    assert "name another paths.output" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_does_not_bear_on_the_weights_may_differ_and_is_told(run, capfd):
    keys = identity.recorded(run)
    save(run, keys=keys | {key: other(keys[key]) for key in FREE})
    check(run)
    resume.report_changes(run, Path(run.paths.output) / "checkpoints")
    said = capfd.readouterr().out
    assert said.startswith("train: resumes from iter_0000003 with ")
    assert f"layout.tp {other(keys['layout.tp'])} -> {keys['layout.tp']}" in said
    assert all(key in said for key in FREE)
    assert said.count("\n") == 1


def test_the_newest_complete_checkpoint_counts(run, tmp_path):
    changed = configure(tmp_path, "adapter.alpha=64")
    checkpoint(run, 6).mkdir()
    checkpoints.mark(checkpoint(run, 6), step=6, training=resume.record(changed))
    check(changed)
    (checkpoint(run, 6) / checkpoints.MARK).unlink()
    with pytest.raises(Fault, match=r"adapter.alpha: 64, but .*iter_0000003 was trained with"):
        check(changed)


def test_a_base_of_other_tensors_is_refused_and_of_the_same_is_not(run, tmp_path):
    base(tmp_path / "base", "a" * 64, stamps={"another": [1, 2]}, tools={"torch": "3.0"})
    check(run)  # converted again
    for digest, facts, named in (("e" * 64, {}, "digest"), ("a" * 64, {"precision": "bf16"}, "precision")):
        base(tmp_path / "base", digest, **facts)
        with pytest.raises(Fault, match=rf"^paths.base: {tmp_path}/base: {named} .* was trained on a base of [a\"f]"):
            check(run)


def test_other_tokens_are_refused_and_the_same_are_not(run, tmp_path):
    tokens(tmp_path / "data", "b" * 64, **{"test.jsonl": "1" * 64, "report.json": "2" * 64})
    check(run)  # prepared again, elsewhere
    tokens(tmp_path / "data", "e" * 64)
    with pytest.raises(Fault, match=rf"^paths.data: {tmp_path}/data: .*iter_0000003 was trained on other tokens"):
        check(run)


def test_another_version_of_training_does_not_go_on(run):
    save(run, version=identity.VERSION + 1)
    with pytest.raises(Fault, match=rf"was trained by version {identity.VERSION + 1} .*, and this is"):
        check(run)


def test_the_order_of_targets_and_an_adapter_that_nobody_trains_do_not_differ(run, tmp_path):
    targets = identity.recorded(run)["adapter.targets"]
    save(run, keys=identity.recorded(run) | {"adapter.targets": targets[::-1]})
    check(run)
    save(configure(tmp_path, "adapter.kind=none", "adapter.rank=4"))
    check(configure(tmp_path, "adapter.kind=none", "adapter.rank=8"))


def test_a_key_that_came_later_was_at_its_default(run, tmp_path):
    keys = identity.recorded(run)
    del keys["optimizer.states"]
    save(run, keys=keys)
    check(run)
    bf16 = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"states": "bf16"})})
    with pytest.raises(Fault, match=r'^optimizer.states: "bf16", but .* was trained with "fp32"'):
        check(bf16)


BRIDGE = """
checkpoint: {save_optim: true}
dataset: {seed: 1234, seq_length: 256}
optimizer: {lr: 0.002, min_lr: 0.0, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08}
peft: {_target_: trainer.megatron.adapters.LoRA, dim: 8, alpha: 16, dropout: 0.0, target_modules: [linear_qkv]}
rng: {seed: 1234}
scheduler: {lr_decay_iters: 30, lr_decay_style: cosine, lr_warmup_iters: 5}
train: {global_batch_size: 16}
"""


def test_a_checkpoint_without_a_record_is_compared_by_megatron_s_own_or_not_at_all(run, capfd):
    checkpoints.mark(checkpoint(run), step=3)
    check(run)
    resume.report_changes(run, Path(run.paths.output) / "checkpoints")
    said = capfd.readouterr().out
    assert "iter_0000003 has no record of its training: keys, base and data could not be compared" in said
    (checkpoint(run) / "run_config.yaml").write_text(BRIDGE.replace("optimizer: {", "optimizer: {bf16: false, "))
    checkpoints.mark(checkpoint(run), step=3)
    with pytest.raises(Fault, match=r'adapter.targets: .* was trained with \["linear_qkv"\]'):
        check(run)


def test_a_checkpoint_with_copies_of_shared_adapters_is_refused(run):
    shared = run.model_copy(update={"adapter": run.adapter.model_copy(update={"experts": "shared"})})
    mark = {key: value for key, value in resume.record(shared).items() if key != "shared_adapters"}
    checkpoints.mark(checkpoint(shared), step=3, training=mark)
    check(shared)  # no experts
    names = {"decoder.layers.1.mlp.experts.linear_fc1.adapter.linear_in.weight7": "0"}
    digests.write(checkpoint(shared), {"digests": names})
    with pytest.raises(Fault, match="a copy of the shared adapters for each expert"):
        check(shared)
    save(shared)
    check(shared)


def test_magnitudes_in_the_order_of_ranks_are_not_taken_for_whole_ones(tmp_path, run):
    dora = run.model_copy(
        update={"adapter": run.adapter.model_copy(update={"kind": "dora", "targets": ("linear_fc1",)})}
    )
    mark = {key: value for key, value in resume.record(dora).items() if key != "magnitudes"}
    for ranks, gated in (1, "true"), (2, "false"):
        config = f"model: {{gated_linear_unit: {gated}, tensor_model_parallel_size: {ranks}}}\n"
        (checkpoint(dora) / "run_config.yaml").write_text(config)
        checkpoints.mark(checkpoint(dora), step=3, training=mark)
        check(dora)
    (checkpoint(dora) / "run_config.yaml").write_text(config.replace("false", "true"))
    checkpoints.mark(checkpoint(dora), step=3, training=mark)
    with pytest.raises(Fault, match="magnitudes of linear_fc1 in the order of 2 tensor-parallel ranks"):
        check(dora)
    save(dora)
    check(dora)


def test_the_command_says_all_of_it_and_ends_with_2_before_anything_starts(configure_model, tmp_path):
    """Once accepted without a word, or stack traces."""
    run = configure_model
    changes = ["adapter.targets=[linear_qkv]", "adapter.alpha=64", "adapter.rank=4", "optimizer.lr=0.1", "data.seed=3"]
    changes += ["train.global_batch=8", "train.micro_batch=8"]
    base(tmp_path / "base", "f" * 64)
    result = subprocess.run(
        [sys.executable, "-m", "trainer.train", "tiny", *changes]
        + [f"paths.{key}={getattr(run.paths, key)}" for key in ("model", "base", "data", "output")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    expected = ["adapter.alpha", "adapter.rank", "adapter.targets", "data.seed", "optimizer.lr", "train.global_batch"]
    assert sorted(line.split(": ")[1] for line in lines) == [*expected[:4], "optimizer.lr", "paths.base", expected[-1]]
    assert all(line.startswith("error: ") for line in lines)


@pytest.fixture
def configure_model(configure, run, tmp_path):
    """The run, with a model that is whole."""
    model = configure("llama").paths.model
    return run.model_copy(update={"paths": run.paths.model_copy(update={"model": model})})
