"""The Slurm engine: its script, and a real Slurm that gets it. Skipped where Debian's slurm-wlm and munge are not."""

import filecmp
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conf.load import load
from contract.faults import Fault
from flows import gang
from tasks.gang.board import Board
from tasks.gang.engines import Demand, slurm
from tasks.store import open_store
from tests.tasks.gang import driver
from tests.tasks.gang.conftest import ROOT, losses, same
from tests.tasks.gang.engines import slurm_cluster

GOLDEN = Path(__file__).parent / "golden"
FAULTS = ["srun is killed", "Slurm takes the job back", "a node is down", "a member is killed"]
GLM = ["slurm.partition=h100", "slurm.time=2-00:00:00", "slurm.folder=/shared/finetune", "slurm.python=/opt/bin/python"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := slurm_cluster.missing():
        pytest.skip(f"no Slurm here: {missing}")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture
def here(cluster, monkeypatch):
    """This process is on that cluster's login host; overrides of a run on two of its nodes."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    chosen = {"gang.engine": "slurm", "layout.nodes": "2", "slurm.gpus": "none"}
    return chosen | {"slurm.setup": f"[export SLURM_CONF={cluster}]"}


def glm(capsys, monkeypatch, *overrides: str) -> str:
    monkeypatch.setenv("FINETUNE_STORE", "s3://bucket/finetune")
    monkeypatch.setenv("FINETUNE_RUNS", "/shared/runs")
    assert gang.main(["glm47", "--engine", "slurm", *GLM, *overrides]) == 0
    return capsys.readouterr().out


def tiny(here: dict[str, str], tmp_path: Path, changes: dict[str, str] | None = None) -> Demand:
    chosen = here | {"paths.logs": f"{tmp_path}/logs"} | (changes or {})
    return Demand.of(load("tiny", [f"{key}={value}" for key, value in chosen.items()], illegal=True))


def wait_for(so, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < until
        time.sleep(0.1)


def of_job(id: str) -> list[psutil.Process]:
    """Processes that this Slurm job has started on this host."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") == id:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("name, overrides", [
    ("glm47.slurm.sh", []),
    ("glm47-pyxis.slurm.sh", ["slurm.image=registry/finetune.sqsh", "slurm.mounts=[/shared:/shared]",
                              "slurm.setup=[module load cuda]", "slurm.options=[--comment=fine tuning]"]),
])  # fmt: skip
def test_the_script_of_glm47_is_the_golden_one(name, overrides, capsys, monkeypatch):
    assert glm(capsys, monkeypatch, *overrides) == (GOLDEN / name).read_text()


def test_the_script_holds_names_of_secrets_and_no_values(capsys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    text = glm(capsys, monkeypatch)
    assert "AWS_SECRET_ACCESS_KEY" in text
    assert "very-secret" not in text


def test_slurm_s_own_lines_are_told_from_what_members_say(tmp_path):
    own = [
        "slurmstepd: error: *** JOB 42 ON node7 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***",
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=42.0. Some of your processes may have been killed",
        "srun: error: Node failure on node7",
    ]
    others = ["0: member 0 of gangs/x/1: failed: rank 1", "srun: got SIGCONT", "1: srun is killed"]
    (tmp_path / "log").write_text("\n".join([*others, *own, *others]))
    assert list(slurm.slurm_lines(tmp_path / "log")) == own
    assert slurm.slurm_lines(tmp_path / "none") == ()


def test_a_real_slurm_takes_the_script_of_glm47(here, capsys, monkeypatch, tmp_path):
    (tmp_path / "script").write_text(glm(capsys, monkeypatch))
    done = subprocess.run(["sbatch", "--test-only", tmp_path / "script"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "using 8 processors on nodes n[1-4] in partition h100" in done.stderr


@pytest.mark.parametrize("changes, says", [
    ({"layout.nodes": "5"}, "not available"),
    ({"slurm.partition": "nix"}, "invalid partition specified: nix"),
    ({"slurm.gpus": '"--gres=gpu:"', "layout.gpus_per_node": "9"}, "not available"),
])  # fmt: skip
def test_what_slurm_can_never_give_is_the_user_s_fault(changes, says, here, tmp_path):
    with pytest.raises(Fault, match=says):
        slurm.capacity(tiny(here, tmp_path, changes))


def test_a_slurm_that_is_away_is_waited_for(cluster, here, monkeypatch, tmp_path):
    conf = tmp_path / "slurm.conf"
    text = cluster.read_text()
    port = next(line for line in text.splitlines() if line.startswith("SlurmctldPort"))
    conf.write_text(text.replace(port, "SlurmctldPort=1") + "MessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    assert "does not answer" in str(slurm.capacity(tiny(here, tmp_path)))


def test_members_start_on_all_nodes_and_a_gang_without_a_controller_is_over(here, tmp_path):
    two = tiny(here, tmp_path)
    assert slurm.capacity(two) is None
    job = slurm.start(two, Board(open_store(str(tmp_path / "store")), "train-x", 1), 2)
    wait_for(lambda: job.alive() == {0: False, 1: False})
    said = job.log.read_text()
    assert "0: gangs/train-x/1: no such attempt" in said and "1: gangs/train-x/1: no such attempt" in said
    job.cancel()


@pytest.mark.parametrize("without, given", [(("n1", "n2"), "n[3-4]"), (("n1", "n2", "n3"), "n[3-4]"), ((), "n[1-2]")])
def test_hosts_to_be_left_out_are_given_only_where_there_are_no_others(without, given, here, tmp_path):
    """The first to have failed, which is named last, before the others."""
    job = slurm.start(tiny(here, tmp_path), Board(open_store(str(tmp_path / "store")), "train-z", 1), 2, without)
    wait_for(lambda: job.alive() == {0: False, 1: False})
    asked = ["squeue", "-h", "-tall", f"-j{job.id}", "-o%N"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout.strip() == given
    job.cancel()


def test_a_job_that_waits_says_for_what_and_is_cancelled_in_the_queue(here, tmp_path):
    blocker = subprocess.run(
        ["sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    two = tiny(here, tmp_path)
    assert slurm.capacity(two) is None  # there is a queue for that
    job = slurm.start(two, Board(open_store(str(tmp_path / "store")), "train-y", 1), 2)
    wait_for(lambda: "Resources" in str(job.waits()))
    assert job.alive() == {0: True, 1: True}
    job.cancel()
    assert job.alive() == {0: False, 1: False}
    subprocess.run(["scancel", blocker], check=True)


def down(hosts: str) -> None:
    subprocess.run(["scontrol", "update", f"node={hosts}", "state=down", "reason=test"], check=True)


def up(hosts: str) -> None:
    # refused where they are back by themselves
    subprocess.run(["scontrol", "update", f"node={hosts}", "state=resume"], stderr=subprocess.DEVNULL)


def test_hosts_that_are_down_are_waited_for_and_not_counted(here, tmp_path):
    two = tiny(here, tmp_path)
    assert slurm.available(two) == 4 and slurm.available(two, ("n1", "n2")) == 2
    down("n[2-4]")
    try:
        assert slurm.available(two) == 1
        assert slurm.capacity(two) == "2 of Slurm's; 1 is neither down nor drained"
        assert slurm.capacity(tiny(here, tmp_path, {"layout.nodes": "1"})) is None
        with pytest.raises(Fault, match="not available"):
            slurm.capacity(tiny(here, tmp_path, {"layout.nodes": "5"}))
    finally:
        up("n[2-4]")
    wait_for(lambda: slurm.available(two) == 4 and slurm.capacity(two) is None, 60)


@pytest.fixture
def train(here, work, request):
    """train() -> a controller under way on that cluster, in a folder of the test's name, and the folder."""
    running: list[subprocess.Popen] = []
    folder = work / ("slurm-" + re.sub(r"\W+", "-", request.node.name))  # test_local has names like these
    folder.mkdir()
    overrides = [f"{key}={value}" for key, value in (here | {"paths.data": work / "one/data"}).items()]

    def train(*more: str, job: str = "train") -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, driver.__file__, job, work / "conf.yaml", folder, work / "store"]
        command += [*overrides, *more]
        with (folder / "output.txt").open("a") as output:
            running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=output, stderr=output))
        return running[-1], folder

    yield train
    for process in running:
        process.kill()
        process.wait()


def under_way(folder: Path) -> tuple[str, list[psutil.Process]]:
    """Once 12 steps are made: the number of Slurm's job, and its processes."""
    metrics = folder / "files/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 12, 90)
    id = next((folder / "logs").glob("slurm-*.log")).stem.removeprefix("slurm-")
    below = of_job(id)
    assert len([process for process in below if "trainer.train" in process.cmdline()]) >= 2
    return id, below


def gone(processes: list[psutil.Process], seconds: float = 30) -> bool:
    return not psutil.wait_procs(processes, seconds)[1]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "fault", ["srun is killed", "Slurm takes the job back", "a node is down", "a member is killed"]
)
def test_it_goes_on_after(fault, train, alone):
    running, folder = train()
    id, below = under_way(folder)
    if fault == "srun is killed":
        for process in below:
            if process.name() == "srun":
                process.kill()
    elif fault == "Slurm takes the job back":
        subprocess.run(["scancel", id], check=True)
    elif fault == "a node is down":
        down("n2")
    else:
        next(process for process in below if process.cmdline()[2:3] == ["tasks.gang.member"]).kill()
    try:
        assert gone(below, 45), [process.cmdline() for process in below if process.is_running()]
        assert running.wait(180) == 0, (folder / "output.txt").read_text()
    finally:
        if fault == "a node is down":
            up("n2")
    assert "attempt 2" in (folder / "output.txt").read_text()
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_it_goes_on_with_fewer_where_hosts_are_down(train, alone):
    running, folder = train("gang.min_nodes=1")
    under_way(folder)
    down("n[2-4]")
    try:
        assert running.wait(180) == 0, (folder / "output.txt").read_text()
    finally:
        up("n[2-4]")
    assert "continues with 1 of 2 hosts" in (folder / "output.txt").read_text()
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_controller_leaves_nothing_and_the_next_one_goes_on(train, alone):
    running, folder = train()
    _, below = under_way(folder)
    running.kill()
    running.wait()
    assert gone(below)
    running, _ = train()
    assert running.wait(180) == 0, (folder / "output.txt").read_text()
    assert same(losses(folder / "files"), alone)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_cancelled_it_saves_and_leaves_no_job(train):
    running, folder = train("train.steps=4000")
    id, below = under_way(folder)
    running.send_signal(signal.SIGTERM)
    assert gone(below)
    assert running.wait(60) == 1
    assert [*folder.glob("files/checkpoints/iter_*/complete.json")]
    assert subprocess.run(["squeue", "-h", f"-j{id}"], capture_output=True, text=True).stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_its_nodes_convert_together(train, work):
    running, folder = train("convert.hosts=all", job="convert")
    assert running.wait(250) == 0, (folder / "output.txt").read_text()
    assert re.search(r"attempt 1: n\d\S*, n\d\S* convert; logs in", (folder / "output.txt").read_text())
    alone, there = work / "base/iter_0000000", folder / "files/iter_0000000"
    names = sorted(file.name for file in alone.iterdir() if file.name != "run_config.yaml")
    assert filecmp.cmpfiles(alone, there, names, shallow=False) == (names, [], [])
