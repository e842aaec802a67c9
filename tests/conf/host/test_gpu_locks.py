"""conf/host/gpu_locks.py with real processes and kills; nvidia-smi is a script that reads what a test writes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from conf.host import gpu_locks, nvidia_smi
from contract.faults import Fault

ROOT = Path(__file__).parents[3]
# A process that takes its turns: says when it has the GPUs, and notes it where two at once would be seen.
HOLDER = """
import sys, time
from conf.host import gpu_locks
hold = gpu_locks.take(sys.argv[1], lambda line: print(line, flush=True))
print("has", *hold.gpus, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """host(uuid=MiB, ...): the GPUs that nvidia-smi shows from now on."""
    fake_nvidia_smi(tmp_path, monkeypatch.setenv)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(gpu_locks.HELD, raising=False)

    def host(**memory: int) -> None:
        show_gpus(tmp_path, {f"GPU-{name}": used for name, used in memory.items()})

    return host


def fake_nvidia_smi(folder: Path, setenv) -> None:
    """On PATH, with locks of its own; setenv(name, value) changes the environment."""
    script = folder / "bin/nvidia-smi"
    script.parent.mkdir()
    script.write_text(f"""#!/bin/sh
case "$1" in
-L) cat {folder}/listed ;;
*memory.used) cat {folder}/used ;;
*) echo "GPU-a, 4711, python"; echo "GPU-x, 4712, other" ;;
esac
""")
    script.chmod(0o755)
    setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    setenv("FINETUNE_LOCKS", str(folder / "locks"))


def show_gpus(folder: Path, used: dict[str, int]) -> None:
    listed = [f"GPU {n}: NVIDIA H200 (UUID: {gpu})\n" for n, gpu in enumerate(used)]
    for name, lines in ("listed", listed), ("used", [f"{gpu}, {mib}\n" for gpu, mib in used.items()]):
        partial = folder / f"{name}.partial"
        partial.write_text("".join(lines))
        partial.rename(folder / name)


def held(gpus: tuple[str, ...]) -> str | None:
    """The present owners of these GPUs, as text; None if all are free."""
    return gpu_locks._said(gpu_locks._look(gpus)[0], gpus) or None


def holder(what: str, seconds: float = 60.0, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER, what, str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def test_on_a_host_without_gpus_nobody_waits_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FINETUNE_LOCKS", str(tmp_path / "locks"))
    first, second = (gpu_locks.take(name, pytest.fail) for name in ("train", "evaluate"))
    assert first == second == gpu_locks.Hold() and not (tmp_path / "locks").exists()


def test_the_second_waits_and_says_for_whom_until_the_first_is_killed(host):
    host(a=0, b=0)
    first = holder("train of tiny-1")
    assert first.stdout.readline() == "has GPU-a GPU-b\n"
    second = holder("evaluate-base of tiny-2")
    said = second.stdout.readline()
    assert re.fullmatch(r"evaluate-base of tiny-2 waits for 2 GPUs: train of tiny-1 has held them for 0:00:..\n", said)
    first.kill()
    killed = time.monotonic()
    assert second.stdout.readline().startswith("evaluate-base of tiny-2 has GPU 0, 1 of this host, after 0:00:0")
    assert second.stdout.readline() == "has GPU-a GPU-b\n" and time.monotonic() - killed < 3
    for process in (first, second):
        process.kill()
        process.communicate()


def test_who_waits_can_be_cancelled_and_has_nothing_then(host):
    host(a=0)
    first = holder("train")
    first.stdout.readline()
    said, began = [], time.monotonic()
    assert gpu_locks.take("evaluate", said.append, lambda: time.monotonic() - began > 1) is None
    assert len(said) == 1 and time.monotonic() - began < 3
    assert held(("GPU-a",)).startswith("train has held it for")
    first.kill()
    first.communicate()
    assert held(("GPU-a",)) is None


def test_different_gpus_are_had_at_once_and_all_or_none_of_them(host, monkeypatch):
    host(a=0, b=0, c=0)
    one = holder("one", CUDA_VISIBLE_DEVICES="2")
    assert one.stdout.readline() == "has GPU-c\n"
    two = holder("two", CUDA_VISIBLE_DEVICES="GPU-a")
    assert two.stdout.readline() == "has GPU-a\n"
    all_of_them = holder("three")
    said = all_of_them.stdout.readline()
    assert "three waits for 3 GPUs: " in said and "two has held 1 of 3 for" in said and "one has held 1 of 3" in said
    assert held(("GPU-b",)) is None, "who waits for one holds no other"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvidia_smi.visible() == ()
    for process in (one, two, all_of_them):
        process.kill()
        process.communicate()


def test_each_gets_as_many_as_it_asks_for_beside_one_another_and_sees_no_others(host):
    host(a=0, b=0, c=0, d=0)
    with (
        contextlib.closing(gpu_locks.take("train", pytest.fail, count=2)) as train,
        contextlib.closing(gpu_locks.take("ask", pytest.fail, count=1)) as ask,
    ):
        assert (train.gpus, ask.gpus) == (("GPU-a", "GPU-b"), ("GPU-c",))
        assert train.environment["CUDA_VISIBLE_DEVICES"] == "0,1" and ask.environment["CUDA_VISIBLE_DEVICES"] == "2"
        assert gpu_locks.take("rest", pytest.fail, count=0) == gpu_locks.Hold()
        with pytest.raises(Fault, match=r"^serve needs 5 GPUs, but this host has 4$"):
            gpu_locks.take("serve", pytest.fail, count=5)


def test_who_has_which_and_who_waits_is_shown(host):
    host(a=0, b=0, c=0)
    assert gpu_locks.standing() == []
    with contextlib.closing(gpu_locks.take("train of x", pytest.fail, count=2)):
        second = holder("evaluate-base of y")
        second.stdout.readline()
        assert [re.sub(r"\d+:\d\d:\d\d", "T", line) for line in gpu_locks.standing()] == [
            "train of x has held GPU 0, 1 for T",
            "evaluate-base of y has waited for 3 GPUs for T",
        ]
        third, said = holder("train of z", CUDA_VISIBLE_DEVICES="2"), "train of z waits for 1 GPU: "
        assert third.stdout.readline() == f"{said}evaluate-base of y waits for 3 GPUs before it\n"
        second.kill()
        second.communicate()
        assert "has GPU 2 of this host, after" in third.stdout.readline()
        third.kill()
        third.communicate()
    assert gpu_locks.standing() == [] and not [*(gpu_locks.folder() / "queue").iterdir()]


def test_nobody_waits_behind_a_process_that_was_suspended(host):
    host(a=0, b=0)
    with contextlib.closing(gpu_locks.take("train", pytest.fail, count=1)):
        waits = holder("all of them")
        waits.stdout.readline()
        stop = time.monotonic() + 1.2
        assert gpu_locks.take("one", lambda line: None, lambda: time.monotonic() > stop, count=1) is None
        waits.send_signal(signal.SIGSTOP)
        with contextlib.closing(gpu_locks.take("one", lambda line: None, count=1)) as hold:
            assert hold.gpus == ("GPU-b",)
        waits.kill()
        waits.communicate()


def test_whoever_is_passed_the_descriptors_has_them_when_the_taker_is_gone(host):
    host(a=0)
    with contextlib.closing(gpu_locks.take("train", pytest.fail)) as hold:
        child = subprocess.Popen(["sleep", "60"], pass_fds=hold.descriptors)
        other = subprocess.Popen(["sleep", "60"])
    assert held(hold.gpus).startswith("train has held it for")
    child.kill()
    child.wait()
    assert held(hold.gpus) is None
    other.kill()
    other.wait()


def test_a_starter_that_holds_them_is_not_waited_for(host):
    host(a=0)
    with contextlib.closing(gpu_locks.take("flow", pytest.fail)) as hold:
        ours = holder("train", 0, **hold.environment)
        assert ours.communicate(timeout=90)[0] == "has\n"


def test_the_memory_of_a_dead_process_is_waited_for(host, monkeypatch):
    host(a=90_000, b=3)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        host(a=200, b=3)

    began = time.monotonic()
    with contextlib.closing(gpu_locks.take("train", say)):
        assert time.monotonic() - began < 5
    assert said == ["train waits for the memory of its GPUs: 87.9 GiB are not free yet"]


def test_memory_of_somebody_who_stays_is_named_and_not_waited_for_for_ever(host, monkeypatch):
    monkeypatch.setattr(gpu_locks, "UNCHANGED", 0.5)
    host(a=2048)
    said: list[str] = []
    with contextlib.closing(gpu_locks.take("train", said.append)) as hold:
        assert hold.gpus == ("GPU-a",)
    expected = "train begins although 2.0 GiB of its GPUs are in use by others: process 4711, python"
    assert said[1:] == [expected]


@pytest.mark.parametrize("trials", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_two_never_have_one_gpu_and_all_are_served_while_processes_are_killed_at_any_moment(trials):
    command = [sys.executable, "-m", "tests.conf.host.gpu_contest", str(trials)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{trials} trials, " in done.stdout and ", 0 killed" not in done.stdout


def test_a_damaged_note_and_another_account_s_umask_are_no_obstacle(host, tmp_path):
    host(a=0)
    before = os.umask(0o077)
    try:
        with contextlib.closing(gpu_locks.take("train", pytest.fail)):
            file = tmp_path / "locks/GPU-a.lock"
            assert json.loads(file.read_text())["what"] == "train"
            assert file.stat().st_mode & 0o777 == 0o666 and file.parent.stat().st_mode & 0o7777 == 0o1777
            file.write_text("{half")
            assert held(("GPU-a",)).startswith("another process has held it for")
    finally:
        os.umask(before)


def test_a_trainer_started_by_hand_waits_too_and_ctrl_c_ends_it(host, tmp_path):
    host(a=0)
    conf = tmp_path / "toy.yaml"
    conf.write_text((ROOT / "conf/tiny.yaml").read_text())
    code = (
        "import os, sys; from trainer.startup import entry; sys.argv = ['toy', 'tiny']\n"
        "def main(run): print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "entry.start(main, lambda run: None, alone=True, gpus='evaluate')\n"
    )
    (tmp_path / "toy_command.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "toy_command"]
    with contextlib.closing(gpu_locks.take("train of flow-1", pytest.fail)):
        in_front = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # behind `&` a shell has Ctrl-C ignored
        waits = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=in_front)
        said = "toy_command of tiny, started by hand waits for 1 GPU: train of flow-1 has held it"
        assert said in waits.stdout.readline()
        waits.send_signal(signal.SIGINT)
        assert waits.wait(90) != 0
        waits.stdout.close()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr
