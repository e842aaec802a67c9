"""trainer.serve as a process: its file written, its first answer awaited, its end."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from contract.served_model import ServedModel

ROOT = Path(__file__).parents[2]
READY = 500.0  # seconds, on a busy machine


@contextlib.contextmanager
def running(served: ServedModel, folder: Path) -> Iterator[str]:
    """Serve the model, with its file and its log in the folder. The value is the address."""
    address = f"http://{served.host}:{served.port}"
    served.write(folder / "model.json")
    command = [sys.executable, "-m", "trainer.serve", str(folder / "model.json")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    until = time.monotonic() + READY
    while not is_healthy(address) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.5)
    try:
        assert is_healthy(address), (folder / "log").read_text()[-4000:]
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
