"""setup.sh on hosts that are in its way, played by shell scripts in a PATH of their own; the Makefile and the lock.

The slow test is the real thing: an empty clone, an environment, a green doctor.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("sh", "cp", "cut", "date", "dirname", "id", "ls", "mkdir", "rm", "sleep", "tr")


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def host(tmp_path):
    """A clone on a host that has a shell and no more: tree/, tools/, and a log of what is asked of its uv."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "setup.sh", tmp_path / "tree")
    for tool in TOOLS:
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    script(tmp_path / "tools/getent", "exit 2")  # this account's own home stays out of it
    return tmp_path


def add_uv(path: Path, host: Path) -> Path:
    return script(
        path, f'echo "$@" >> {host}/log\ncase "$1 $2" in "python find") echo {host}/fetched/python3.12 ;; esac'
    )


def add_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(sys.executable)
    return path


def setup(host: Path, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    where = ":".join(str(folder) for folder in (*path, host / "tools"))
    variables = {"PATH": where, "HOME": str(host / "home"), "PYTHON_DIRS": "", **variables}
    return subprocess.run(["sh", "tree/setup.sh"], cwd=host, env=variables, capture_output=True, text=True)


def synced_with(host: Path) -> str:
    command, _, python = (host / "log").read_text().splitlines()[-1].rpartition(" ")
    assert command == "sync --quiet --frozen --extra cpu --python"
    return python


@pytest.mark.parametrize("named_by", ["shims on PATH", "PYENV_ROOT", "HOME"])
def test_a_failing_shim_is_not_taken_for_what_it_hides(host, named_by):
    root = host / ("home/.pyenv" if named_by == "HOME" else "pyenv")
    for name in ("python3.12", "uv"):
        script(root / "shims" / name, f'echo "pyenv: {name}: command not found" >&2; exit 127')
    for version in ("3.11.7", "3.13.0"):
        script(root / "versions" / version / "bin/python3.12", "echo wrong; exit 1")
    real = add_python(root / "versions/3.12.9/bin/python3.12")
    add_uv(host / "bin/uv", host)

    path = [host / "bin"] if named_by == "PYENV_ROOT" else [root / "shims", host / "bin"]
    done = setup(host, *path, **({"PYENV_ROOT": str(root)} if named_by == "PYENV_ROOT" else {}))

    assert done.returncode == 0, done.stderr
    assert synced_with(host) == str(real)
    assert f"({host}/bin/uv)" in done.stdout


def test_python_dirs_are_searched(host):
    real = add_python(host / "modules/python/bin/python3.12")
    add_uv(host / "bin/uv", host)
    assert setup(host, host / "bin", PYTHON_DIRS=f"{host}/modules/*/bin").returncode == 0
    assert synced_with(host) == str(real)


def test_uv_fetches_a_python_where_there_is_none(host):
    script(host / "bin/python3.12", "echo 3.12 in name alone; exit 1")
    script(host / "fetched/python3.12", "echo Python 3.12.99")
    add_uv(host / "bin/uv", host)
    done = setup(host, host / "bin")
    assert done.returncode == 0, done.stderr
    assert "python install --no-bin 3.12" in (host / "log").read_text()
    assert synced_with(host) == f"{host}/fetched/python3.12"


def test_nothing_to_fetch_uv_with(host):
    script(host / "bin/python3", "exit 1")  # too old, or without pip
    done = setup(host, host / "bin")
    assert done.returncode == 1
    assert done.stdout == "setup: looks for uv and Python 3.12\n"
    assert done.stderr.count("\n") == 1
    assert "sudo apt-get install python3-venv" in done.stderr


@pytest.mark.parametrize("venv_works", [True, False])
def test_a_uv_that_is_too_old_is_replaced(host, venv_works):
    script(host / "bin/uv", "exit 2")  # as uv does under pyproject.toml's required-version
    add_uv(host / "wheel/uv", host)
    python = script(
        host / "bin/python3.12",
        f"""echo "$@" >> {host}/log
        case "$*" in
            -c*) echo "$0" ;;
            "-m venv .uv") {'mkdir -p .uv/bin && cp "$0" .uv/bin/python' if venv_works else "exit 1"} ;;
            "-m pip install"*) mkdir -p .uv/bin && cp {host}/wheel/uv .uv/bin ;;
        esac""",
    )
    done = setup(host, host / "bin")
    assert done.returncode == 0, done.stderr
    assert synced_with(host) == str(python)
    assert f"({host}/tree/.uv/bin/uv)" in done.stdout
    assert ("pip install --quiet --target .uv uv" in (host / "log").read_text()) is not venv_works


def test_a_long_step_prints_a_line_every_ten_seconds(host):
    """With a pause of no time in its place; the clock ends with the script."""
    add_uv(host / "bin/uv", host).write_text('#!/bin/sh\n[ "$1" != sync ] || exec /bin/sleep 1\n')
    add_python(host / "bin/python3.12")
    (host / "tools/sleep").unlink()
    script(host / "tools/sleep", "exec /bin/sleep 0.1")
    lines = setup(host, host / "bin").stdout.splitlines()
    assert lines[0] == "setup: looks for uv and Python 3.12"
    assert len([line for line in lines if line in ("setup: 0 s", "setup: 1 s")]) > 3


def test_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert targets == [line.partition(":")[0] for line in makefile.splitlines() if line[:1].islower() and ": " in line]
    make = ["make", "--no-print-directory", "EXTRA=cpu"]
    shown = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == targets


def working_uv() -> str:
    for uv in (str(ROOT / ".uv/bin/uv"), shutil.which("uv")):
        if uv and shutil.which(uv) and subprocess.run([uv, "--version"], capture_output=True).returncode == 0:
            return uv
    pytest.skip("no uv here that works")


def test_lock_is_in_step_with_pyproject():
    uv = [working_uv(), "lock", "--check", "--offline", "--python", sys.executable]
    done = subprocess.run(uv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_empty_clone_to_green_doctor(tmp_path):
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}

    def make(target: str) -> str:
        command = ["make", "--no-print-directory", target, "EXTRA=cpu"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "setup: done in" in make("setup")
    start = time.monotonic()
    assert make("setup") == "setup: .venv is up to date with uv.lock (extra cpu)\n"
    assert time.monotonic() - start < 2
    assert "green for" in make("doctor")


def test_make_clean_removes_what_the_project_has_made_and_nothing_else(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    own = [".venv/bin/python", ".uv/uv", ".ruff_cache/x", "conf/__pycache__/a.pyc", "benchmarks/__pycache__/b.pyc"]
    own += ["contract/__pycache__/f.pyc", "tests/support/__pycache__/g.pyc", "flows/__pycache__/c.pyc"]
    own += ["tasks/store/__pycache__/d.pyc", "trainer/data/__pycache__/e.pyc"]
    kept = ["runs/tiny/__pycache__/a.pyc", "mine/__pycache__/b.pyc", "__pycache__/c.pyc", "conf/tiny.yaml", "notes.txt"]
    for name in (*own, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    subprocess.run(["make", "clean", "EXTRA=cpu"], cwd=tmp_path, check=True, capture_output=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"Makefile", *kept}
