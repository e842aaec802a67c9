"""tasks/gang/diagnosis/host_evidence.py: on a made-up root, and on this machine's own kernel where that can be done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.host import nvidia_smi
from tasks.gang.diagnosis.host_evidence import Host, oom_kills


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "cgroup, file",
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/b/memory.events"),
        ("0::/\n", "sys/fs/cgroup/memory.events"),
        ("0::/outside/name\n", "sys/fs/cgroup/memory.events"),
        ("5:cpu:/x\n4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.oom_control"),
    ],
)
def test_kills_are_counted_from_the_beginning(tmp_path, cgroup, file):
    put(tmp_path / "proc/self/cgroup", cgroup)
    put(tmp_path / file, "low 0\noom 3\noom_kill 2\n")
    host = Host(tmp_path)
    assert oom_kills(tmp_path) == 2 and host.evidence()["oom_kills"] == 0
    put(tmp_path / file, "oom_kill 3\nunder_oom 0\n")
    assert host.evidence()["oom_kills"] == 1


def test_a_host_that_tells_nothing_has_no_evidence(tmp_path):
    assert Host(tmp_path).evidence() == {"oom_kills": 0, "kernel": ()}


def test_the_gpu_s_name_is_the_driver_s(tmp_path):
    put(tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   83\n")
    assert nvidia_smi.kind(tmp_path) == "NVIDIA H200"


def test_the_kernel_s_log_is_read_from_now_on():
    """With a line that no monitoring takes for a broken GPU."""
    try:
        with open("/dev/kmsg", "w") as log:
            host = Host()
            log.write("a line of no concern\n")
            log.flush()
            log.write("NVLink: a line of a test\n")
    except OSError:
        pytest.skip("/dev/kmsg is not writable")
    lines = host.evidence()["kernel"]
    if not lines:
        pytest.skip("the kernel's log cannot be read here")
    assert "NVLink: a line of a test" in lines and "a line of no concern" not in lines
    assert host.evidence()["kernel"] == ()


@pytest.fixture
def cgroup():
    """A cgroup of 64 MB under this process's own; of version 1 or 2."""
    if "SwapTotal:             0 kB" not in Path("/proc/meminfo").read_text():
        pytest.skip("with swap the kernel kills nobody")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        base = Path("/sys/fs/cgroup/memory" if controllers == "memory" else "/sys/fs/cgroup")
        folder = base / path.lstrip("/") / f"gang-test-{os.getpid()}"
        limit = "memory.limit_in_bytes" if controllers == "memory" else "memory.max"
        if controllers not in ("memory", ""):
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(64 << 20))
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("no cgroup can be made here")


def test_a_process_that_the_kernel_killed_is_counted(cgroup):
    code = (
        "import sys; from pathlib import Path; from tasks.gang.diagnosis.host_evidence import Host\n"
        "import os, subprocess\n"
        f"Path({str(cgroup / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "host = Host()\n"
        "eats = subprocess.run([sys.executable, '-c', 'x = bytearray(1 << 30)'])\n"
        "print(eats.returncode, host.evidence()['oom_kills'])\n"
        f"Path({str(cgroup.parent / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(-signal.SIGKILL), "1"], done.stderr
