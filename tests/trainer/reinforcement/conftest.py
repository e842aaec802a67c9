"""Reinforcement learning of the tiny GLM-4-MoE on tickets, started as a person starts it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import preloaded
from trainer.data.tickets import tickets

KEYS = {
    "data.seq_length": 64,
    "adapter.kind": "none",
    "train.global_batch": 8,
    "train.micro_batch": 8,
    "checkpoint.save_every": 2,
    "reinforce.start": "base",
    "reinforce.prompts": 4,
    "reinforce.samples": 4,
    "reinforce.max_tokens": 8,
    "reinforce.lr": 1e-3,
    "reinforce.reward": "regex",
    "reinforce.pattern": "e",  # some of what a model says that was never trained
}
IMPORTS = """
from trainer.rehearsal import forked_ranks
forked_ranks.import_all()
import trainer.reinforcement.loop
"""
TRAINER = "trainer.reinforce"
Start = Callable[..., tuple[subprocess.Popen, Path]]


@pytest.fixture(scope="session")
def rows(work, base) -> Path:
    """Folder of prompts. The base is there as well."""
    base("glm4-moe")
    folder = work / "tickets"
    folder.mkdir()
    lines = [json.dumps({"input": ticket, "output": team}) + "\n" for ticket, team in tickets(64, seed=0).items()]
    (folder / "training.jsonl").write_text("".join(lines[:48]))
    (folder / "validation.jsonl").write_text("".join(lines[48:]))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folder of what a file's tests write: others have runs of the same names."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def arguments(work, place, rows):
    """arguments(name, overrides) -> what a command is told, and the folder that it writes."""

    def arguments(name: str, overrides: dict[str, object]) -> tuple[list[str], Path]:
        folder = place / name
        paths = {"paths.model": work / "glm4-moe", "paths.base": work / "glm4-moe-base", "paths.data": rows}
        paths |= {"paths.reinforced": folder, "paths.logs": place / f"{name}-logs"}
        keys = [f"{key}={value}" for key, value in (KEYS | paths | overrides).items()]
        return [str(work / "conf.yaml"), *keys], folder

    return arguments


@pytest.fixture(scope="module")
def forked(arguments, place):
    """forked(name, overrides, module, **environment) -> a trainer as a fork of a process that has imported Megatron,
    which is most of what a start takes, and the folder that it writes."""
    with preloaded.python(IMPORTS) as fork:

        def forked(
            name: str, overrides: dict[str, object], module: str = TRAINER, **environment: str
        ) -> tuple[preloaded.Started, Path]:
            given, folder = arguments(name, overrides)
            return fork.start(module, *given, output=place / f"{name}.log", **environment), folder

        yield forked


@pytest.fixture
def start(arguments, place):
    """start(name, overrides, module) -> a process of a command, and the folder that it writes."""
    started: list[subprocess.Popen] = []

    def start(name: str, overrides: dict[str, object], module: str = TRAINER) -> tuple[subprocess.Popen, Path]:
        given, folder = arguments(name, overrides)
        command = [sys.executable, "-m", module, *given]
        with (place / f"{name}.log").open("a") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return started[-1], folder

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def finish(start, place):
    """finish(name, overrides, module) -> the folder that a command has written to its end."""

    def finish(name: str, overrides: dict[str, object], module: str = TRAINER) -> Path:
        process, folder = start(name, overrides, module)
        assert process.wait(1500) == 0, (place / f"{name}.log").read_text()[-4000:]
        return folder

    return finish
