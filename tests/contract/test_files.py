"""A file that is written atomically is the old one or the new one, whole, whatever happens meanwhile."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from contract import checkpoints, files, output_marks
from contract.files import is_partial, open_atomically, write_atomically

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path) -> Path:
    found = tmp_path / "mark.json"
    found.write_text("old")
    return found


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def in_a_process(code: str, path: Path) -> subprocess.CompletedProcess:
    lines = (
        f"import os, resource, signal, sys\nfrom contract.files import write_atomically\npath = {str(path)!r}\n{code}"
    )
    return subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("durable", [True, False])
def test_new_content_replaces_old_and_nothing_else_is_left(path, durable):
    write_atomically(path, "nëw", durable=durable)
    assert path.read_text() == "nëw" and names(path) == ["mark.json"]
    write_atomically(path.with_name("other"), b"\0", durable=durable)
    assert path.with_name("other").read_bytes() == b"\0"


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_usual_mode_and_a_replaced_one_its_own(path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomically(path.with_name("new"), "", durable=False)
        path.chmod(0o640)
        write_atomically(path, "new", durable=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.with_name("new").stat().st_mode) == mode
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_name_as_long_as_can_be(tmp_path):
    for name in ("n" * 255, "ü" * 127):
        write_atomically(tmp_path / name, "x", durable=False)
        assert (tmp_path / name).read_text() == "x"


def test_a_full_disk_leaves_the_old_file_and_names_it(path):
    """As a process meets it that may write no more: EFBIG, in the middle of the file."""
    done = in_a_process(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_atomically(path, b'x' * 5000, durable=True)\n"
        "except OSError as error:\n    print(error.errno, error.filename)",
        path,
    )
    assert (done.stdout, done.stderr) == (f"{errno.EFBIG} {path}\n", "")
    assert path.read_text() == "old" and names(path) == ["mark.json"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk needs root")
def test_a_disk_that_is_full_to_the_last_block(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        write_atomically(small / "a", "old", durable=True)
        with pytest.raises(OSError, match="No space left") as full:
            write_atomically(small / "a", bytes(1 << 20), durable=True)
        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(small / "a"))
        assert (small / "a").read_text() == "old" and names(small / "a") == ["a"]
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("fails", ["fsync", "replace", "fchmod"])
def test_whatever_call_fails_the_old_file_stays(path, fails, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(files.os, fails, fail)
    with pytest.raises(OSError, match="planted") as failed:
        write_atomically(path, "new", durable=True)
    monkeypatch.undo()
    assert failed.value.filename == str(path)
    assert path.read_text() == "old" and names(path) == ["mark.json"]


def test_killed_between_write_and_rename_the_old_file_stays_and_the_rest_is_known(path):
    code = "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nwrite_atomically(path, 'new', durable=False)"
    assert in_a_process(code, path).returncode == -signal.SIGKILL
    (rest,) = set(names(path)) - {"mark.json"}
    assert path.read_text() == "old" and is_partial(rest) and path.with_name(rest).read_text() == "new"
    assert not is_partial("mark.json") and not is_partial("x.partial") and not is_partial(".x.partial")


def test_such_a_rest_is_nobody_s_work_in_an_output(tmp_path):
    (tmp_path / ".results.json.0123abcd.partial").write_text("{")
    assert not list(output_marks.problems(tmp_path, output_marks.EVALUATION))


def test_a_mark_does_not_list_the_rest_of_one_that_was_cut_short(tmp_path):
    (tmp_path / "weights").write_text("x")
    (tmp_path / f".{checkpoints.MARK}.0123abcd.partial").write_text("{")
    checkpoints.mark(tmp_path, step=3)
    assert checkpoints.read_mark(tmp_path) == {"step": 3, "files": {"weights": 1}}


def test_a_folder_in_the_way_stays(path):
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("kept")
    with pytest.raises(IsADirectoryError) as refused:
        write_atomically(path, "new", durable=True)
    assert refused.value.filename == str(path)
    assert (path / "inside").read_text() == "kept" and names(path) == ["mark.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as refused:
        write_atomically(tmp_path / "no/file", "new", durable=True)
    assert refused.value.filename == str(tmp_path / "no/file")


def test_an_error_of_the_writer_s_own_keeps_the_old_file(path):
    with pytest.raises(KeyError), open_atomically(path, durable=False) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_text() == "old" and names(path) == ["mark.json"]


def test_durable_is_the_content_then_the_name_then_the_folder(path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: calls.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    monkeypatch.setattr(files.os, "replace", lambda *both: (calls.append("replace"), replace(*both)))
    write_atomically(path, "new", durable=True)
    assert calls == [False, "replace", True]
    calls.clear()
    write_atomically(path, "newer", durable=False)
    assert calls == ["replace"]
