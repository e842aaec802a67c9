"""What is wrong on disk is said in one line that names the file, before a rank starts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from contract import checkpoints
from contract.faults import Fault
from trainer.checks import inputs
from trainer.data import prepared
from trainer.rehearsal import tiny_models
from trainer.reinforcement.journal import Journal, facts
from trainer.training import resume

LONG = ("data.seq_length=512",)  # as the longest rows


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    tiny_models.make_model("glm4-moe", folder / "model")
    tiny_models.make_data(folder / "given", rows=128)
    rows = [{"input": f"Repeat {n}:", "output": f"{n} and {n + 1}"} for n in range(8)]
    (folder / "given/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared.make(configure(folder, f"paths.data={folder / 'given'}", f"paths.output={folder / 'made'}"))
    shutil.copytree(folder / "made/data", folder / "data")
    (folder / "base").mkdir()
    (folder / "base" / "weights").write_text("stand for the converted model")
    checkpoints.mark(folder / "base", architecture="Toy")
    return folder


def configure(folder: Path, *paths: str):
    paths = paths or (f"paths.data={folder / 'data'}", f"paths.output={folder / 'output'}")
    return load("tiny", [*paths, *(f"paths.{part}={folder / part}" for part in ("model", "base")), *LONG])


@pytest.fixture
def run(original, tmp_path):
    for part in ("model", "data", "base"):
        shutil.copytree(original / part, tmp_path / part)
    return configure(tmp_path)


def test_accepts_what_is_whole(run):
    inputs.check_train(run)
    inputs.check_convert(run)


def test_a_key_that_would_not_reach_megatron_s_model_is_named_and_can_be_answered_for(run):
    file = Path(run.paths.model) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_topk_prob": False, "sliding_window": 8}))
    with pytest.raises(
        Fault, match=r"(?s)config\.json: norm_topk_prob is false, .* config\.json: sliding_window is 8, "
    ):
        inputs.check_convert(run)
    ignored = run.model.model_copy(update={"ignore_config": ("norm_topk_prob", "sliding_window")})
    inputs.check_convert(run.model_copy(update={"model": ignored}))


def test_a_step_of_reinforcement_may_have_more_answers_than_there_are_prompts(run, tmp_path):
    asked = run.reinforce.model_copy(update={"steps": 1, "start": "base", "prompts": 64, "samples": 8})
    paths = run.paths.model_copy(update={"reinforced": str(tmp_path / "reinforced")})
    inputs.check_reinforce(run.model_copy(update={"reinforce": asked, "paths": paths}))


def test_reinforcement_that_went_on_with_other_keys_is_told_by_its_own(run, tmp_path):
    """Its checkpoints would say the same by the keys of a training, which nobody has set."""
    asked = run.reinforce.model_copy(update={"steps": 1, "start": "base"})
    paths = run.paths.model_copy(update={"reinforced": str(tmp_path / "reinforced")})
    begun = run.model_copy(update={"reinforce": asked, "paths": paths})
    journal = Journal(tmp_path / "reinforced")
    journal.begin(facts(begun))
    inputs.check_reinforce(begun)
    other = begun.model_copy(update={"reinforce": asked.model_copy(update={"lr": 0.25})})
    says = r"^reinforce\.lr: 0\.25, but .*/rollouts was begun with 1e-06; .* name another paths\.reinforced$"
    with pytest.raises(Fault, match=says):
        inputs.check_reinforce(other)


def shard(run) -> Path:
    return sorted(Path(run.paths.model).glob("*.safetensors"))[0]


def test_truncated_safetensors(run):
    path = shard(run)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Fault, match=rf"^{path}: truncated: \d+ bytes, but its tensors need \d+; download it again$"):
        inputs.check_convert(run)


def test_safetensors_cut_within_the_header(run):
    shard(run).write_bytes(b"\x00\x01")
    with pytest.raises(Fault, match="truncated: 2 bytes do not even hold the header"):
        inputs.check_convert(run)


def test_a_page_of_html_in_place_of_a_shard(run):
    shard(run).write_bytes((2).to_bytes(8, "little") + b"<html>")
    with pytest.raises(Fault, match="no safetensors header"):
        inputs.check_convert(run)


def test_missing_shard(run):
    shard(run).unlink()
    with pytest.raises(Fault, match=r"1 of the \d shards in model.safetensors.index.json are missing: model-00001"):
        inputs.check_convert(run)


def test_missing_model(run):
    shutil.rmtree(run.paths.model)
    with pytest.raises(Fault, match=r"^paths.model: .*: no such folder"):
        inputs.check_convert(run)


def test_tokenizer_of_another_model(run):
    path = Path(run.paths.model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 100}))
    with pytest.raises(Fault, match=r"token id \d+ does not fit the model, whose vocab_size is 100"):
        inputs.check_convert(run)


def test_no_tokenizer(run):
    for path in Path(run.paths.model).glob("tokenizer*"):
        path.unlink()
    with pytest.raises(Fault, match=r"no tokenizer \(tokenizer.json\)"):
        inputs.check_train(run)


def test_checkpoint_without_its_mark(run):
    (Path(run.paths.base) / checkpoints.MARK).unlink()
    with pytest.raises(Fault, match=r"not a complete checkpoint .* python -m trainer.convert"):
        inputs.check_train(run)


def test_checkpoint_with_a_cut_file(run):
    (Path(run.paths.base) / "weights").write_text("stand")
    with pytest.raises(Fault, match="not a complete checkpoint"):
        inputs.check_train(run)


def test_layout_that_does_not_divide(run):
    cut = run.model_copy(update={"layout": run.layout.model_copy(update={"ep": 3, "gpus_per_node": 3})})
    with pytest.raises(Fault, match=r"layout.ep"):
        inputs.check_train(cut)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "neither prepared.json .* nor training.jsonl, with one JSON object per line"),
        ("", "training.jsonl: has no rows"),
        ("[1]\n", r"training.jsonl:1: not an object with columns: \[1\]"),
        ('{"input": "a"}\n', "training.jsonl:1: no known columns: the columns are input"),
        ('{"input": 1, "output": "b"}\n', "training.jsonl:1: input: not text: 1"),
        ('{"input": "a", "output": "b"}\n{"input": \n', "training.jsonl:2: not JSON"),
        ('{"input": "a", "output": "b"}\n', "train.global_batch: 16, but .* contains 1 sequences for training"),
    ],
)
def test_rows_that_cannot_be_trained_on(text, expected, run):
    shutil.rmtree(run.paths.data)
    if text is not None:
        Path(run.paths.data).mkdir()
        (Path(run.paths.data) / "training.jsonl").write_text(text)
    with pytest.raises(Fault, match=expected):
        inputs.check_train(run)


def test_prepared_data_that_were_edited(run):
    path = Path(run.paths.data) / "training.idx.parquet"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(Fault, match=f"^{path}: changed since it was prepared; python -m trainer.prepare"):
        inputs.check_train(run)


def edit(path: Path) -> None:
    """As long as it was, another answer."""
    text = path.read_text()
    path.write_text(text.replace("0", "9", 1) if "0" in text else text.replace("e", "i", 1))
    assert path.read_text() != text


def to_evaluate(run):
    return run.model_copy(update={"paths": run.paths.model_copy(update={"served": run.paths.model})})


@pytest.mark.parametrize("name", ["test.jsonl", "template.json"])
def test_questions_that_were_edited_are_not_asked(name, run):
    inputs.check_evaluate(to_evaluate(run))
    edit(Path(run.paths.data) / name)
    with pytest.raises(Fault, match=rf"/data/{name}: changed since it was prepared; python -m trainer.prepare"):
        inputs.check_evaluate(to_evaluate(run))


@pytest.fixture
def by_hand(original, tmp_path):
    """A run on rows made by hand, with a checkpoint."""
    for part in ("model", "given", "base"):
        shutil.copytree(original / part, tmp_path / part)
    run = configure(tmp_path, f"paths.data={tmp_path / 'given'}", f"paths.output={tmp_path / 'output'}")
    inputs.check_train(run)
    step = checkpoints.step_folder(tmp_path / "output/checkpoints", 5)
    step.mkdir(parents=True)
    checkpoints.mark(step, step=5, training=resume.record(run))
    inputs.check_train(run)
    inputs.check_evaluate(to_evaluate(run))
    return run


@pytest.mark.parametrize("name", ["training", "validation"])
def test_rows_made_by_hand_that_are_edited_in_mid_training_end_it(name, by_hand, tmp_path):
    made = (tmp_path / "output/data/prepared.json").read_text()
    edit(tmp_path / f"given/{name}.jsonl")
    with pytest.raises(Fault, match=rf"{name}.jsonl: changed since step 5 in .*/output was trained on it"):
        inputs.check_train(by_hand)
    assert (tmp_path / "output/data/prepared.json").read_text() == made
    shutil.rmtree(tmp_path / "output/checkpoints")
    inputs.check_train(by_hand)
    assert (tmp_path / "output/data/prepared.json").read_text() != made, "without a checkpoint they are prepared anew"


def test_rows_made_by_hand_that_are_taken_away_in_mid_training_end_it(by_hand, tmp_path):
    (tmp_path / "given/validation.jsonl").unlink()
    with pytest.raises(Fault, match=r"validation.jsonl: gone since step 5"):
        inputs.check_train(by_hand)


def test_a_setting_of_rows_made_by_hand_that_differs_in_mid_training_ends_it(by_hand):
    other = by_hand.model_copy(update={"data": by_hand.data.model_copy(update={"loss_on": "all"})})
    with pytest.raises(Fault, match=r'data.loss_on: "all", but .* set it back to resume from step 5'):
        inputs.check_train(other)


def test_questions_made_by_hand_that_were_edited_after_training_are_not_asked(by_hand, tmp_path):
    edit(tmp_path / "given/test.jsonl")
    with pytest.raises(Fault, match=r"given/test.jsonl: was edited after its preparation into .*/output/data"):
        inputs.check_evaluate(to_evaluate(by_hand))


def command(*arguments: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=root, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_command_says_it_in_one_line_and_exits_with_2(run, tmp_path):
    path = shard(run)
    path.write_bytes(path.read_bytes()[:-1])
    result = command("trainer.convert", "tiny", f"paths.model={run.paths.model}", f"paths.base={tmp_path}/new")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {path}: truncated")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_all_wrong_keys_at_once():
    result = command("trainer.train", "tiny", "train.stps=3", "layout.tp=two", "optimizer.lr=-1")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    assert "did you mean train.steps?" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_too_little_space_is_seen_before_it_is_used(run, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        result = command("trainer.convert", "tiny", f"paths.model={run.paths.model}", f"paths.base={small}/base")
        assert result.returncode == 2
        assert re.search(r"needs \d+\.\d MB and 25\d\.\d KB are free there", result.stderr)
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)
