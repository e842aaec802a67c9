"""trainer/trial.py: models that are cut keep their kinds of layers, and what Megatron holds is what is planned."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from conf.load import load
from conf.model_facts import facts_from_hf
from conf.model_files import config_json
from conf.planner.hardware import GPUS
from conf.planner.verdict import config_of
from conf.rules.layout import problems
from contract import installation
from contract.faults import Fault
from trainer import trial
from trainer.profiling import report
from trainer.rehearsal.tiny_models import KINDS


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "trainer.trial", "tiny", *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "cut",
    [
        "model.source=tiny://glm4-moe-mtp layout.pp=2 data.packed=true adapter.kind=none",
        pytest.param(
            "model.source=tiny://qwen3-moe layout.tp=2 layout.sp=true layout.ep=2 train.recompute=full "
            "train.precision=bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_megatron_holds_what_is_planned(cut, tmp_path):
    sized = ("layout.gpus_per_node=2", "train.global_batch=4", "train.micro_batch=1")
    done = command(*cut.split(), *sized, "--steps", "5", "--json", "--profile-to", str(tmp_path / "profile"))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["device"], answer["gpu"], answer["out_of_memory"]) == ("cpu", None, None)
    assert [row["rank"] for row in answer["ranks"]] == [0, 1]
    for row in answer["ranks"]:
        measured = {key: row["measured"][key] for key in trial.STATES}
        assert measured == {key: row["planned"][key] for key in trial.STATES} and measured["optimizer"] > 0
        assert len(row["seconds"]) == 4 and row["measured"]["seconds"] in row["seconds"]
    assert len(answer["ranks"][1]["losses"]) == 7
    holds_a_profile_of_the_host(answer["profile"])


def holds_a_profile_of_the_host(profile):
    """Without a GPU there are no kernels; collectives are the host's operations."""
    assert [row["rank"] for row in profile["ranks"]] == [0, 1]
    for row in profile["ranks"]:
        assert row["steps"] == 1 and row["span"] > 0 and not row["kernels"] and not row["gaps"]
        assert any(one["name"].startswith("gloo:") for one in row["operations"])
        assert Path(row["trace"]).stat().st_size > 0
    assert Path(profile["page"]).read_text().count("<svg") == 2
    assert any("no kernels" in line for line in report.lines(profile))


def test_results_without_a_place_go_to_the_folder_of_runs(tmp_path, monkeypatch):
    """In a checkout that is its runs/, whatever the current folder is."""
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(installation, "CODE", tmp_path)
    monkeypatch.delenv("FINETUNE_RUNS", raising=False)
    options = argparse.Namespace(conf="a/tiny.yaml", profile_to=None)
    assert trial._profile_folder(options).parent == tmp_path / "runs"
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "elsewhere"))
    assert trial._profile_folder(options).parent == tmp_path / "elsewhere"
    assert {path.name for path in tmp_path.iterdir()} == {"current", "runs", "elsewhere"}
    assert not any((tmp_path / "current").iterdir())


@pytest.mark.parametrize(
    "arguments, line",
    [
        ("--steps 2", "--steps: 2, but the first 2 are not measured"),
        ("--steps 4 train.precision=bf16 train.cuda_graphs=true", "--steps: 4, but the first 4 are not measured"),
        ("--layers 5", "--layers: 5 is not between 1 and 4"),
        ("--layers 1", "--layers: 1 leaves no dense layer of 4"),
        ("model.source=tiny://nemotron-h-mtp --layers 1", "--layers 1: config.json: num_nextn_predict_layers is 1 of"),
        ("layout.ep=3 layout.gpus_per_node=3", "layout.ep: 3 does not divide the 8 experts"),
        ("--gpu h300", "gpu: 'h300' is not one of "),
        ("--profile-to conf", "conf exists and is not empty"),
    ],
)
def test_faults_are_one_line(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer.trial", "tiny", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        trial.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and line in said.err, said.err
    assert len(said.err.splitlines()) <= 2 and not said.out


def test_a_fault_of_the_process_that_measures_is_one_line():
    done = command("layout.nodes=2", "train.micro_batch=1")
    assert done.returncode == 2 and "layout.nodes: 2 hosts; start one torchrun per host" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 2 and not done.stdout


@pytest.mark.parametrize(
    "name, layers, kinds, mtp",
    [
        ("glm47", 6, ["dense"] + 5 * ["moe"], 1),
        ("glm47", 2, ["dense", "moe"], 1),
        ("deepseek-v3-64", 61, 3 * ["dense"] + 58 * ["moe"], 1),
        ("qwen3-235b", 3, 3 * ["moe"], 0),
        ("llama31-70b", 4, 4 * ["dense"], 0),
        ("gpt2-large", 5, 5 * ["dense"], 0),
        ("nemotron3-super-4xh100", 8, [*3 * ["mamba", "moe"], "mamba", "attention"], 1),
    ],
)
def test_a_cut_model_has_layers_of_every_kind(name, layers, kinds, mtp):
    config = config_of(load(name, illegal=True))[0]
    facts = facts_from_hf(trial.cut(config, layers))
    assert ([*facts.kinds], facts.mtp_layers) == (kinds, mtp)
    assert facts.hidden == facts_from_hf(config).hidden


@pytest.mark.parametrize("name", ["llama31-8b-1xh100", "qwen3-30b-a3b-1xh100"])
def test_the_measured_run_is_legal_for_dense_and_moe_models(name, tmp_path):
    run = load(name)
    config = trial.cut(config_of(run)[0], 2)
    facts = facts_from_hf(config)
    settled = trial.settle(run, config, 3, tmp_path)
    assert settled.moe.force_balance == bool(facts.experts)
    assert problems(settled, facts) == []


def test_packed_rows_of_a_trial_have_the_length_that_is_given(tmp_path):
    run = load("llama31-8b-1xh100", ["data.packed=true", "data.seq_length=4096", "train.global_batch=2"])
    trial.settle(run, trial.cut(config_of(run)[0], 1), 3, tmp_path, rows=1024)
    starts = parquet.read_table(tmp_path / "data" / "training.idx.parquet")["seq_start_id"].to_pylist()
    assert starts == [[0, 1025, 2050, 3075]] * 2  # each row with its last label


def test_kinds_of_layers_are_cut_off_with_the_layers():
    config = config_of(load("tiny", ["model.source=openai/gpt-oss-20b"], illegal=True))[0]
    assert trial.cut(config, 3)["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_a_cut_model_keeps_the_layers_that_have_keys_of_their_own():
    config = config_json.of_text(KINDS["gemma4"])  # the last 4 of its 8 layers take keys of earlier ones
    kinds = facts_from_hf(config).kinds
    longer = config | {"num_hidden_layers": 12, "layer_types": config["layer_types"] + config["layer_types"][:4]}
    cut = trial.cut(longer | {"num_kv_shared_layers": 8}, 8)
    assert (cut["num_kv_shared_layers"], facts_from_hf(cut).kinds) == (4, kinds)


def test_layers_that_are_dense_by_their_number_are_cut_off():
    config = {**config_of(load("qwen2-moe", illegal=True))[0], "mlp_only_layers": [1, 20]}
    assert facts_from_hf(trial.cut(config, 3)).kinds == ("moe", "dense", "moe")
    with pytest.raises(Fault, match="between 1 and"):
        trial.cut(config, 0)


EXHAUSTED = """
import os, sys, threading, torch
from pathlib import Path
from conf.load import load
from trainer import measure, trial
from conf.planner.verdict import config_of
from trainer.startup import entry

run = load("tiny", ["layout.nodes=1", "layout.gpus_per_node=1"])
made = trial.settle(run, config_of(run)[0], 3, Path(sys.argv[1]))
os.environ.update(entry.ALONE)
measure.device.start()
from megatron.bridge.training import gpt_step, pretrain
from trainer.training import bridge_loop

def exhausted(*_):
    raise torch.OutOfMemoryError("planted")

bridge_loop.CLEANUP_SECONDS = 0.2
gpt_step.forward_step = exhausted
pretrain._cleanup_after_pretrain_failure = lambda *_: threading.Event().wait()
with entry.faults_in_one_line():
    measure.main(made)
"""


def test_a_rank_without_memory_ends_whatever_its_process_groups_wait_for(tmp_path):
    """NCCL's groups were seen to be given up by no rank of two that both had run out of memory."""
    done = subprocess.run([sys.executable, "-c", EXHAUSTED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "rank 0: out of memory with " in done.stderr, done.stderr[-2000:]
    assert json.loads((tmp_path / "output" / "out-of-memory.json").read_text())["line"] == "planted"


def test_running_out_of_memory_is_an_answer():
    run = load("tiny")
    facts = facts_from_hf(config_of(run)[0])
    answer: dict = trial.compare(run, facts, GPUS["h100"], []) | {"layers": 4, "of_layers": 4, "steps": 3}
    seen = {"rank": 0, "allocated": 79 * 10**9, "whole": 85 * 10**9}
    [head, *_, last] = trial.lines(answer | {"out_of_memory": seen})
    assert head.startswith("tiny: 4 of 4 layers") and answer["ranks"][0]["planned"]["allocated"] > 0
    assert last == "rank 0: out of memory with 79.0 of 85.0 GB allocated"
