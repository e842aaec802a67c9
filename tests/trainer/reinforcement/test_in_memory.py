"""Folders in memory through which weights go: what a killed process leaves goes with the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.faults import Fault
from trainer.reinforcement.transfer import in_memory

KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.reinforcement.transfer import in_memory
in_memory.MEMORY = Path(sys.argv[1])
with in_memory.folder() as folder:
    (Path(folder) / "model.safetensors").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(in_memory, "MEMORY", tmp_path)
    return tmp_path


def test_what_a_killed_process_left_goes_with_the_next_and_what_another_holds_stays(memory):
    (memory / "others").mkdir()
    (memory / "rollout-of-another-program").mkdir()
    others = {*memory.iterdir()}
    assert subprocess.run([sys.executable, "-c", KILLED, str(memory)]).returncode == -signal.SIGKILL
    assert len([*memory.glob(f"{in_memory.PREFIX}*/model.safetensors")]) == 1
    with in_memory.folder() as first, in_memory.folder() as second:
        assert {*memory.iterdir()} == others | {Path(first), Path(second)}
    assert {*memory.iterdir()} == others


def test_a_folder_that_another_takes_for_one_that_was_left_is_made_again(memory, monkeypatch):
    made, taken = in_memory.tempfile.TemporaryDirectory, []

    def taken_at_once(**settings):
        found = made(**settings)
        if not taken:
            taken.append(found.name)
            os.rmdir(found.name)
        return found

    monkeypatch.setattr(in_memory.tempfile, "TemporaryDirectory", taken_at_once)
    with in_memory.folder() as folder:
        assert folder not in taken and [*memory.iterdir()] == [Path(folder)]
    assert not [*memory.iterdir()]


def test_a_container_with_little_shared_memory_is_named(memory):
    full = "Error while serializing: I/O error: No space left on device (os error 28)"  # safetensors'
    with pytest.raises(Fault, match=rf"^{memory}: No space left on device; .* are free there"), in_memory.folder():
        raise RuntimeError(full)
    with pytest.raises(RuntimeError, match=r"^another$"), in_memory.folder():
        raise RuntimeError("another")
