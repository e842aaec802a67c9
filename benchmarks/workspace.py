"""Folder for one benchmark. No process that was started in it outlives the benchmark, however the benchmark ends.

    with workspace("store") as folder: ...

A separate watcher process notices the end of the benchmark, even by SIGKILL. It ends every process with the folder in
its environment, which children inherit, and removes the folder.

Not covered: network namespaces and mounts of gangs (tests/tasks/gang/world.py), which the next start removes.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
MARK = "FINETUNE_BENCHMARK"  # environment variable


@contextlib.contextmanager
def workspace(name: str, parent: str | None = None) -> Iterator[Path]:
    """Yield a new folder below `parent`, by default the folder of temporary files."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=parent)).resolve()
    command = [sys.executable, "-m", "benchmarks.workspace", str(folder)]
    watcher = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    os.environ[MARK] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[MARK]
        assert watcher.stdin
        watcher.stdin.close()
        watcher.wait()


def marked(folder: str) -> list[psutil.Process]:
    """Return the processes that were started in the folder, and their descendants."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == folder:
                found.append(process)
    return found


def clear(folder: str) -> None:
    while left := marked(folder):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()  # ends with the benchmark
    clear(sys.argv[1])
