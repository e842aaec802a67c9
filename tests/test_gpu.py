"""The comparison of a GPU with the CPU where there is one; on any host, the CPU's part and what packs the kit."""

import json
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from conf.load import load
from conf.model_facts import facts_from_hf
from conf.planner.hardware import GPUS
from conf.planner.memory import memory
from conf.planner.verdict import config_of
from conf.rules.layout import problems
from conf.schema.run import dotted_keys
from trainer.trial import cut

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
PLAN = runpy.run_path(str(FOLDER / "plan.py"))
COMPARE = runpy.run_path(str(FOLDER / "compare.py"))
SLIM = runpy.run_path(str(FOLDER / "slim_fatbin.py"))["slim"]


def gpus() -> int:
    found = shutil.which("nvidia-smi")
    listed = subprocess.run([found, "-L"], capture_output=True, text=True).stdout if found else ""
    return sum(line.startswith("GPU ") for line in listed.splitlines())


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_the_gpu_trains_what_the_cpu_trains():
    if gpus() < 1:
        pytest.skip("no GPU here")
    done = subprocess.run(["bash", FOLDER / "run"], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["passed"], done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_compute_what_torch_and_transformer_engine_do(tmp_path):
    if gpus() < 1:
        pytest.skip("no GPU here")
    command = ["bash", FOLDER / "run", "kernels.py", tmp_path, "--only", "sums", "fp8", "layers"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_gangs_on_two_gpus_survive(tmp_path):
    if gpus() < 2:
        pytest.skip("fewer than two GPUs here")
    done = subprocess.run(["bash", FOLDER / "run", "gang.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_for_gangs_on_gpus(tmp_path):
    """A cancelled gang, over gloo."""
    command = [sys.executable, FOLDER / "gang.py", tmp_path, "--cpu-only", "--steps", "50", "--seconds", "800"]
    done = subprocess.run([*command, "--layout", "dp2 ep2", "--fault", "cancel"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    before, cancelled = json.loads((tmp_path / "gang.json").read_text())
    assert before["difference"] < 1e-5 and cancelled["difference"] < 1e-5
    assert (cancelled["lost"], cancelled["orphans"]) == (0, 0) and cancelled["noticed"] < cancelled["clean"] < 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_cpu_trains_what_the_golden_file_says(tmp_path):
    command = [sys.executable, FOLDER / "compare.py", "--cpu-only", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["pair"] for row in figures["differences"]} == {"cpu/golden", "resumed/cpu"}


def test_golden_file_has_every_case():
    golden = json.loads((FOLDER / "golden.json").read_text())
    assert list(golden) == [str(case) for case in COMPARE["CASES"]]
    assert {len(losses) for case in golden.values() for losses in case.values()} == {COMPARE["STEPS"]}


def test_trials_are_legal_and_fit_an_h200():
    trials = PLAN["TRIALS"]
    assert len({trial.name for trial in trials}) == len(trials) and len({trial.group for trial in trials}) == 4
    keys = {*dotted_keys()}
    for trial in (trial for trial in trials if trial.overrides.keys() <= keys):
        run = load(trial.conf, [f"{key}={value}" for key, value in trial.overrides.items()], illegal=True)
        config, _ = config_of(run)
        facts = facts_from_hf(cut(config, trial.layers) if trial.layers else config)
        assert not problems(run, facts), trial.name
        assert all(stage.over < 0 for stage in memory(run, facts, GPUS["h200"])), trial.name


def test_a_trial_that_fails_is_a_row():
    row = PLAN["take"](PLAN["Trial"]("wrong", "memory", "no-such-run", 2, ""))
    assert "no-such-run" in row["failed"] and "no-such-run" in PLAN["line"](
        {**row, "name": "x", "known": None, "took": 1}
    )


def test_difference_is_the_largest_of_any_loss_and_step():
    difference = COMPARE["difference"]
    assert (
        difference({"lm_loss": [2.0, 4.0], "mtp_loss": [1.0, 1.0]}, {"lm_loss": [2.0, 5.0], "mtp_loss": [1.0, 1.1]})
        == 0.2
    )
    assert difference({"lm_loss": [float("nan")]}, {"lm_loss": [1.0]}) == float("inf")
    assert difference({"lm_loss": [1.0]}, {"lm_loss": [1.0], "mtp_loss": [1.0]}) == float("inf")


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    packed = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 257, 64, len(code), arch) + code for kind, arch, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


def test_slim_keeps_one_architecture_s_machine_code(tmp_path):
    library = tmp_path / "library.so"
    before = fat_binary((2, 80, b"a" * 8), (2, 90, b"b" * 8), (1, 90, b"ptx" * 8))
    library.write_bytes(b"\x7fELF" + before + b"host code" + fat_binary((2, 90, b"c" * 16)) + b"end")

    SLIM(library, 90)

    after = fat_binary((2, 80, bytes(8)), (2, 90, b"b" * 8), (1, 90, bytes(24)))
    assert library.read_bytes() == b"\x7fELF" + after + b"host code" + fat_binary((2, 90, b"c" * 16)) + b"end"


def test_slim_keeps_the_newest_ptx_of_what_has_no_machine_code(tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(fat_binary((2, 80, b"a" * 8), (1, 80, b"b" * 8), (1, 75, b"c" * 8), (1, 100, b"d" * 8)))

    SLIM(library, 90)

    after = fat_binary((2, 80, bytes(8)), (1, 80, b"b" * 8), (1, 75, bytes(8)), (1, 100, bytes(8)))
    assert library.read_bytes() == after


def test_slim_refuses_what_it_does_not_understand(tmp_path):
    library = tmp_path / "library.so"
    for content, reason in (
        (fat_binary((2, 80, b"a" * 8)), "no code for sm_90"),
        (fat_binary((7, 90, b"a" * 8)), "kind 7"),
    ):
        library.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            SLIM(library, 90)
        assert library.read_bytes() == content
