"""Gangs whose hosts are process groups of this one: what happens to them, and that none outlives its controller."""

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tasks.gang import driver
from tests.tasks.gang.conftest import ROOT, losses, same, trainer, wait_for
from trainer.data.tickets import tickets, with_worse
from trainer.rehearsal import tiny_models


@pytest.fixture
def start(work, request):
    """start(*overrides) -> a controller under way, in a folder of the test's name."""
    running: list[subprocess.Popen] = []

    def start(*overrides: str, again: bool = False, job: str = "train") -> subprocess.Popen:
        folder = place(work, request)
        assert folder.exists() == again
        folder.mkdir(exist_ok=True)
        command = [sys.executable, driver.__file__, job, work / "conf.yaml", folder, work / "store", "layout.nodes=2"]
        if not any(one.startswith("paths.data=") for one in overrides):
            command.append(f"paths.data={work / 'one/data'}")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with (folder / "output.txt").open("a") as output:
            running.append(
                subprocess.Popen([*command, *overrides], cwd=ROOT, env=environment, stdout=output, stderr=output)
            )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def folder(work, request) -> Path:
    return place(work, request)


def place(work: Path, request) -> Path:
    return work / request.node.name.replace("[", "-").strip("]")


def step(folder: Path) -> int:
    path = folder / "files/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(folder: Path, number: int, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while step(folder) < number:
        assert time.monotonic() < until, (folder / "output.txt").read_text()
        time.sleep(0.05)


def ranks(of: subprocess.Popen, job: str = "train") -> list[psutil.Process]:
    found = psutil.Process(of.pid).children(recursive=True)
    return [p for p in found if f"trainer.{job}" in p.cmdline() and "trainer.startup.torchrun" not in p.cmdline()]


def members(of: subprocess.Popen) -> list[psutil.Process]:
    found = psutil.Process(of.pid).children(recursive=True)
    return [p for p in found if "tasks.gang.member" in p.cmdline() and "tasks.run.guard" not in p.cmdline()]


def output(folder: Path) -> str:
    return (folder / "output.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_rank_is_named_and_the_loss_is_that_of_one_host(start, folder, alone):
    gang = start()
    wait_for_step(folder, 12)
    ranks(gang)[1].kill()
    assert gang.wait(120) == 0, output(folder)
    assert "killed by SIGKILL" in output(folder)
    assert "attempt 2" in output(folder) and "attempt 3" not in output(folder)
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim, sent, says", [("rank", 19, "stopped (SIGSTOP"), ("member", 9, "no longer answer")])
def test_it_goes_on_after(victim, sent, says, start, folder, alone):
    gang = start()
    wait_for_step(folder, 12)
    (ranks if victim == "rank" else members)(gang)[0].send_signal(sent)
    assert gang.wait(150) == 0, output(folder)
    assert says in output(folder)
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_controller_leaves_nothing_and_the_next_one_goes_on(start, folder, alone):
    gang = start()
    wait_for_step(folder, 12)
    below = psutil.Process(gang.pid).children(recursive=True)
    gang.kill()
    _, alive = psutil.wait_procs(below, 20)
    assert alive == []
    gang.wait()
    assert start(again=True).wait(150) == 0, output(folder)
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
def test_cancelled_it_saves_and_leaves_nothing(start, folder, work):
    gang = start("train.steps=4000")
    wait_for_step(folder, 3)
    below = psutil.Process(gang.pid).children(recursive=True)
    gang.send_signal(signal.SIGTERM)
    assert gang.wait(40) == 1
    assert "Stopped" in output(folder)
    _, alive = psutil.wait_procs(below, 1)
    assert alive == []
    assert [*folder.glob("files/checkpoints/iter_*/complete.json")]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_fault_of_the_user_s_ends_it_at_once(start, folder):
    gang = start("optimizer.lr=1e-300")
    assert gang.wait(90) == 1
    assert "Fault" in output(folder) and "nothing is learned after 2 steps" in output(folder)
    assert "attempt 2" not in output(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_convert_together_and_go_on_with_what_is_finished(start, folder, work):
    gang = start("convert.hosts=all", "gang.start_within=300", job="convert")
    begun = folder / "files.partial/iter_0000000"
    wait_for((begun / ".metadata").exists, 300)  # written last, before layers are compared
    parts = {path.stem for path in (folder / "files.partial/unfinished").glob("*.json")}
    made = {file.name: file.stat().st_mtime_ns for number in parts for file in begun.glob(f"__{number}_0.distcp")}
    assert len(parts) > 1 and made
    ranks(gang, "convert")[1].kill()
    assert gang.wait(300) == 0, output(folder)
    assert re.search(r"attempt 1: \S+, \S+ convert; logs in", output(folder))
    assert "killed by SIGKILL" in output(folder)
    assert "attempt 2" in output(folder) and "attempt 3" not in output(folder)
    there = folder / "files/iter_0000000"
    assert {name: (there / name).stat().st_mtime_ns for name in made} == made, "a part was made twice"
    alone = work / "base/iter_0000000"
    names = sorted(file.name for file in alone.iterdir() if file.name != "run_config.yaml")
    assert filecmp.cmpfiles(alone, there, names, shallow=False) == (names, [], [])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_ask_the_reference_of_dpo_together_and_no_row_twice(start, folder, work):
    rows = with_worse(tickets(320, seed=0), seed=0)
    write_rows(work / "ranked", [json.dumps(row) for row in rows])
    asks = ["train.objective=dpo", "train.micro_batch=1", f"paths.data={work / 'ranked-data'}"]
    trainer("prepare", str(work / "conf.yaml"), *asks, f"data.source={work / 'ranked'}")
    ask_together(start, folder, work, asks, ["training.npy", "validation.npy"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_ask_the_reference_of_distill_together_and_no_row_twice(start, folder, work):
    rows = tickets(320, seed=0).items()
    write_rows(work / "taught", [json.dumps({"input": ask, "output": team}) for ask, team in rows])
    asks = ["train.objective=distill", "train.teacher=tiny://qwen3", "train.micro_batch=1", "data.loss_on=all"]
    asks += [f"paths.data={work / 'taught-data'}", f"paths.teacher={work / 'teacher'}"]
    asks += [f"paths.teacher_base={work / 'teacher-base'}"]
    tiny_models.make_model("qwen3", work / "teacher", dtype="float32")
    trainer("prepare", str(work / "conf.yaml"), *asks, f"data.source={work / 'taught'}")
    given = [f"paths.model={work / 'teacher'}", f"paths.base={work / 'teacher-base'}", "layout.gpus_per_node=1"]
    trainer("convert", str(work / "conf.yaml"), *given)
    names = [f"{split}-{name}.npy" for split in ("training", "validation") for name in ("values", "ids", "starts")]
    ask_together(start, folder, work, asks, names)


def write_rows(folder: Path, lines: list[str]) -> None:
    folder.mkdir()
    (folder / "training.jsonl").write_text("".join(line + "\n" for line in lines))


def ask_together(start, folder: Path, work: Path, asks: list[str], names: list[str]) -> None:
    """Ask on one host, then on two of which one rank is killed: files of these names are the same, byte by byte."""
    alone = folder.with_name(f"{folder.name}-alone")
    trainer("reference", str(work / "conf.yaml"), *asks, f"paths.reference={alone}")
    gang = start(*asks, "gang.start_within=300", job="reference")
    wait_for(lambda: [*folder.glob("files/unfinished/*.npz")], 300)
    ranks(gang, "reference")[1].kill()
    assert gang.wait(300) == 0, output(folder)
    assert re.search(r"attempt 1: \S+, \S+ reference; logs in", output(folder))
    assert "killed by SIGKILL" in output(folder)
    assert "attempt 2" in output(folder) and "attempt 3" not in output(folder)
    assert re.search(r"reference: continues with \d+ of \d+ rows", output(folder))
    told = (folder / "files/progress.jsonl").read_text().splitlines()
    assert json.loads(told[-1])["done"] == json.loads(told[-1])["total"]
    assert filecmp.cmpfiles(alone, folder / "files", names, shallow=False) == (names, [], [])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_host_that_does_not_come_back_is_gone_on_without(start, folder, alone):
    gang = start("gang.min_nodes=1")
    wait_for_step(folder, 12)
    members(gang)[0].kill()
    assert gang.wait(150) == 0, output(folder)
    assert re.search(r"(\S+/\d) no longer answers; continues with 1 of 2 hosts, without \1\n", output(folder))
    (hosts,) = re.findall(r"attempt 2: (.*) train;", output(folder))
    assert "," not in hosts and hosts not in output(folder).partition("continues")[2].splitlines()[0]
    assert same(losses(folder / "files"), alone)
