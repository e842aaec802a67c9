"""trainer/weights/exported/storing.py: what the kernel is asked to store, and to forget where memory is short."""

import os

import pytest

from trainer.weights.exported.storing import Storing


@pytest.fixture
def asked(monkeypatch):
    """What the kernel was asked for, as file, first byte and count."""
    found = []

    def advise(descriptor, start, size, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), start, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.fixture
def files(tmp_path):
    for name in ("release", "merged"):
        (tmp_path / name).write_bytes(bytes(100))
    return tmp_path / "release", tmp_path / "merged"


def write_two(size, release, merged):
    with Storing(size) as storing:
        storing.begin((merged, 8, 20), [(release, 0, 10), (release, 10, 0)])
        storing.begin((merged, 28, 30), [(release, 10, 15)])


def test_what_fits_into_memory_stays_there(asked, files):
    write_two(1000, *files)
    assert asked == [("merged", 8, 20), ("merged", 28, 30)]


def test_what_does_not_fit_is_forgotten_once_it_is_stored(asked, files):
    """Of a span of 0 bytes the kernel would forget all that follows."""
    write_two(2**60, *files)
    first = [("merged", 8, 20), ("release", 0, 10)]
    assert asked == [*first, ("merged", 28, 30), ("merged", 8, 20), ("release", 10, 15)]


def test_a_file_that_is_gone_is_somebody_elses_to_tell_of(asked, files):
    files[0].unlink()
    write_two(2**60, *files)
    assert [name for name, *_ in asked] == ["merged"] * 3
