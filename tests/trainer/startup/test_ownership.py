"""contract/ownership.py by commands of the trainer: a folder has one owner, whose death frees it. No Megatron."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conf.load import load
from contract import ownership
from contract.faults import Fault
from trainer.startup import entry

ROOT = Path(__file__).parents[3]

# A command that writes paths.output: it says so, waits for its end, and dies where "break" is there.
TOY = """
import os, sys, time
from pathlib import Path
from contract import ownership
from contract.output_marks import TRAINING, take
from trainer.checks import places
from trainer.startup import entry

ownership.RENEWED = 0.1

def main(run):
    output = Path(run.paths.output)
    for rest in output.glob("unfinished-*"):
        rest.unlink()
    (output / f"unfinished-{os.getpid()}").write_text("half of a checkpoint")
    print("writes", flush=True)
    while not (output / "end").exists():
        time.sleep(0.02)

def prepare(run):
    take(Path(run.paths.output), TRAINING)

if __name__ == "__main__":
    entry.start(main, prepare, writes="output", may_write=places.check_train)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(ownership, "RENEWED", 0.1)
    monkeypatch.setattr(ownership, "EXPIRES", 1.0)
    monkeypatch.setattr(ownership, "POLLED", 0.02)
    for name in ("RANK", "GANG_ATTEMPT", entry.OWNED, entry.GUARDED):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(tmp_path):
    """start(folder, **environment): the toy command on that folder; what still runs is ended with the test."""
    (tmp_path / "toy.py").write_text(TOY)
    processes = []

    def start(folder: Path, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "toy", "tiny", f"paths.output={folder}"],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


def owned(folder: Path):
    return entry.own(load("tiny", [f"paths.output={folder}"]), "output")


def plant(folder: Path, number: int = 1, **content) -> Path:
    """The file of an owner on another host."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".owner.{number}"
    known = {"about": "trainer.train", "host": "far", "boot": "another", "pid": 7, "started": "1", "attempt": ""}
    path.write_text(json.dumps(known | {"since": "2026-11-22 10:00:00+00:00"} | content))
    return path


@pytest.fixture
def touched():
    """touched(file): another host touches it from now on, as a living owner does."""
    over = threading.Event()
    threads = []

    def touch(path: Path) -> None:
        def beat():
            while not over.wait(0.05):
                os.utime(path)

        threads.append(threading.Thread(target=beat))
        threads[-1].start()

    yield touch
    over.set()
    for thread in threads:
        thread.join()


def test_a_second_start_is_refused_before_it_touches_what_the_first_writes(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    before = {path.name: path.read_text() for path in (tmp_path / "output").iterdir()}
    second = start(tmp_path / "output")
    said = second.communicate(timeout=20)[0]
    assert second.returncode == 2
    assert said.startswith(f"error: paths.output: {tmp_path}/output: toy (process {first.pid} on ")
    assert " has owned it since 20" in said
    assert said.count("\n") == 1
    assert {path.name: path.read_text() for path in (tmp_path / "output").iterdir()} == before
    (tmp_path / "output" / "end").touch()
    assert first.wait(5) == 0
    assert not list((tmp_path / "output").glob(".owner*"))


def test_another_name_of_the_folder_is_the_same_folder(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    (tmp_path / "link").symlink_to(tmp_path / "output")
    with pytest.raises(Fault, match=f"process {first.pid} on"), owned(tmp_path / "link"):
        pass


def test_the_death_of_its_owner_frees_a_folder_at_once(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    first.send_signal(signal.SIGKILL)
    first.wait(5)
    second = start(tmp_path / "output")
    assert second.stdout.readline() == "writes\n"


def test_what_a_killed_flow_has_left_may_end_before_the_next_flow_goes_on(start, tmp_path, monkeypatch, capfd):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    monkeypatch.setenv(entry.GUARDED, "1")
    ending = threading.Timer(0.5, (tmp_path / "output" / "end").touch)
    ending.start()
    with owned(tmp_path / "output"):
        assert first.poll() is not None or first.wait(5) == 0
    assert f" s for toy (process {first.pid} on " in capfd.readouterr().out


def test_one_that_goes_on_is_not_what_a_killed_flow_has_left(start, tmp_path, monkeypatch):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    monkeypatch.setenv(entry.GUARDED, "1")
    monkeypatch.setattr(entry, "LEAVES", 0.2)
    began = time.monotonic()
    run = load("tiny", [f"paths.output={tmp_path}/output", "gang.grace=1"])
    with pytest.raises(Fault, match=f"process {first.pid} on"), entry.own(run, "output"):
        pass
    assert 1.2 <= time.monotonic() - began < 5


def test_a_stopped_owner_of_this_host_is_alive(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(Fault, match=f"process {first.pid} on"), owned(tmp_path / "output"):
        pass


def test_an_owner_on_another_host_that_is_seen_to_live_keeps_its_folder(tmp_path, touched):
    touched(plant(tmp_path / "output"))
    since = r"has owned it since 2026-11-22 10:00:00\+00:00"
    expected = rf"trainer.train \(process 7 on far\) {since}; end that process or wait for it"
    with pytest.raises(Fault, match=expected), owned(tmp_path / "output"):
        pass


def test_a_host_that_is_lost_loses_its_folder_after_a_while(tmp_path, capfd):
    file = plant(tmp_path / "output")
    os.utime(file, (4e9, 4e9))  # its clock is far ahead of this one's
    began = time.monotonic()
    with owned(tmp_path / "output"):
        assert time.monotonic() - began > ownership.EXPIRES
        assert not file.exists()
    assert "process 7 on far" in capfd.readouterr().out


def test_a_later_attempt_of_a_gang_does_not_wait_and_another_gang_does(tmp_path, monkeypatch, touched):
    monkeypatch.setenv("GANG_ATTEMPT", "train-0a1b-11")
    file = plant(tmp_path / "one", attempt="train-0a1b-9")
    began = time.monotonic()
    with owned(tmp_path / "one"):
        assert time.monotonic() - began < ownership.EXPIRES / 2
        assert not file.exists()
    for number, other in enumerate(("train-0a1b-12", "train-ffff-9", "")):
        touched(plant(tmp_path / str(number), attempt=other))
        with pytest.raises(Fault, match="process 7 on far"), owned(tmp_path / str(number)):
            pass


def test_an_owner_that_was_taken_for_lost_ends_itself(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    plant(tmp_path / "output", number=2)
    assert first.wait(5) == 1
    assert "taken over by trainer.train (process 7 on far)" in first.stdout.read()


def test_of_many_starts_at_once_one_gets_the_folder(tmp_path):
    """Threads race through the same steps as processes do; owners by other hosts' names keep them apart."""
    plant(tmp_path / "output", boot="another", attempt="gang-1")
    place = tmp_path / "output" / ".owner"
    me, won, lost, begin = ownership.me(), [], [], threading.Barrier(8)

    def reach(number: int) -> None:
        begin.wait()
        try:
            won.append(ownership._take(place, "output", me | {"attempt": "gang-2"}, 0.0, print))
        except Fault:
            lost.append(number)

    threads = [threading.Thread(target=reach, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert list((tmp_path / "output").iterdir()) == won


def test_ranks_share_the_folder_of_their_run(start, tmp_path):
    """Rank 0 of a torchrun that was started by hand owns it; ranks that a command starts leave that to the command."""
    ranks = {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    zero = start(tmp_path / "output", RANK="0", **ranks)
    assert zero.stdout.readline() == "writes\n"
    assert start(tmp_path / "output", RANK="1", **ranks).stdout.readline() == "writes\n"
    assert start(tmp_path / "output", RANK="0", **ranks, **{entry.OWNED: "1"}).stdout.readline() == "writes\n"
    assert start(tmp_path / "output", RANK="0", **ranks).wait(20) == 2


def test_a_command_that_fails_leaves_no_trace_of_its_ownership(tmp_path):
    with pytest.raises(Fault, match="no such model"), owned(tmp_path / "new" / "output"):
        raise Fault("no such model")
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_folder_is_a_fault(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path, why in (("file", "File exists"), ("file/x", "Not a directory")):
        with pytest.raises(Fault, match=f"^paths.output: {tmp_path}/{path}: {why}$"), owned(tmp_path / path):
            pass


def test_a_tidied_up_file_is_made_again(start, tmp_path):
    first = start(tmp_path / "output")
    assert first.stdout.readline() == "writes\n"
    (tmp_path / "output" / ".owner.1").unlink()
    until = time.monotonic() + 5
    while not (tmp_path / "output" / ".owner.1").exists() and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(Fault, match=f"process {first.pid} on"), owned(tmp_path / "output"):
        pass


COMMANDS = {"train": "output", "convert": "base", "prepare": "data", "export": "export", "evaluate": "evaluation"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_writes_a_folder_asks_who_owns_it(command, tmp_path):
    """The owner is this test's own process."""
    key = COMMANDS[command]
    with entry.own(load("tiny", [f"paths.{key}={tmp_path / 'folder'}"]), key):
        before = sorted(tmp_path.iterdir())
        result = subprocess.run(
            [sys.executable, "-m", f"trainer.{command}", "tiny", f"paths.{key}={tmp_path / 'folder'}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert sorted(tmp_path.iterdir()) == before
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: paths.{key}: {tmp_path / 'folder'}: ")
    assert f"(process {os.getpid()} on " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a read-only mount needs root")
def test_a_folder_that_nobody_can_write_has_no_owner(tmp_path):
    """What is finished lies on such storage, and is read there."""
    (tmp_path / "output").mkdir()
    bind = ["mount", "--bind", tmp_path / "output", tmp_path / "output"]
    if not shutil.which("mount") or subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("no bind mounts here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", tmp_path / "output"], check=True)
        with owned(tmp_path / "output"):
            assert not list((tmp_path / "output").iterdir())
    finally:
        subprocess.run(["umount", tmp_path / "output"], check=True)
