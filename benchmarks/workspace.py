"""A folder for one benchmark; nothing that was started in it outlives the benchmark, however that ends.

    with workspace("store") as folder: ...

A watcher, a process of its own, notices when the benchmark is gone, also by SIGKILL: it ends every process that has the
folder in its environment, which children inherit, and removes the folder.

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
    """A new folder below `parent`, by default the temporary files' place."""
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
    """Processes that were started in the folder, or by such a one."""
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
