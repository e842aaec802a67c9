"""What the dynamic linker needs of torch's libraries is read ahead, by commands that are about to load them."""

import os
import subprocess
import sys
import time

import pytest

from trainer.startup import ahead

IS_NO_LIBRARY = {
    "empty": b"",
    "text": b"nothing of the kind",
    "a header that ends": ahead.MAGIC + bytes(20),
    "no tables": ahead.MAGIC + bytes(100),
    "tables beyond the end": ahead.MAGIC + b"\xff" * 100,
}


def test_libraries_are_found_without_loading_torch():
    code = "import sys; from trainer.startup import ahead; print(*ahead.libraries()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ahead.WHOLE in done.stdout and "libtorch_python" in done.stdout


def test_what_the_linker_needs_lies_in_the_library_and_is_little_of_it():
    libraries = [path for path in ahead.libraries() if path.name.startswith("libtorch_")]
    assert libraries
    for path in libraries:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            found = list(ahead.spans(file))
        assert len(found) >= 3, f"{path}: data, strings and relocations"
        assert all(first >= 0 and count > 0 and first + count <= size for first, count in found)
        assert sum(count for _, count in found) < size, path


@pytest.mark.parametrize("kind", IS_NO_LIBRARY)
def test_what_is_no_library_is_passed_over(kind, tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(IS_NO_LIBRARY[kind])
    ahead.read([path, tmp_path / "missing.so", tmp_path])


def test_pages_are_in_memory_afterwards(tmp_path):
    path = tmp_path / ahead.WHOLE
    path.write_bytes(os.urandom(2**20))
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ahead.read([path])
        end = time.monotonic() + 10
        while not _is_there(file.fileno(), 2**20) and time.monotonic() < end:
            time.sleep(0.01)
        assert _is_there(file.fileno(), 2**20)


def _is_there(descriptor: int, size: int) -> bool:
    """Whether all of it can be read without waiting for a disk."""
    try:
        return os.preadv(descriptor, [bytearray(size)], 0, os.RWF_NOWAIT) == size
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("argv", "begun", "reads"),
    [
        (["-m"], ["python", "-m", "trainer.convert", "tiny"], True),
        (["-m"], ["python", "-m", "trainer.prepare", "tiny"], False),
        (["/somewhere/pytest"], ["python", "-m", "pytest", "trainer.convert"], False),
        ([], ["python"], False),
    ],
)
def test_only_a_command_that_loads_torch_reads_ahead(argv, begun, reads, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", begun)
    monkeypatch.setattr(ahead, "libraries", lambda: asked.append(True) or [])
    ahead.begin()
    assert bool(asked) == reads
