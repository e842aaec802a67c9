"""Member of a gang on one host: its preparations while it waits, and its files for other hosts."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import as_yaml, load
from tasks.gang import member
from tasks.gang.board import Board
from tasks.gang.messages import Member, Task, Word
from tasks.store import open_store


@pytest.mark.parametrize(
    ("command", "place", "ships"), [("train", 0, True), ("train", 1, False), ("evaluate", 0, False)]
)
def test_the_first_host_of_a_training_tells_spare_hosts_what_its_ranks_import(command, place, ships):
    """Also in an attempt that began without a spare host: one may join later."""
    ranks: Any = SimpleNamespace(logs=lambda: {"torchrun.log": Path("a")}, modules=Path("modules.json"))
    files = member._shipped(ranks, None, Task(command, 2, 1, 1), place)
    assert files.pop("torchrun.log") == Path("a")
    assert (files == {"modules.json": Path("modules.json")}) == ships and bool(files) == ships


@pytest.mark.parametrize(
    ("attempt", "order", "imports"),
    [
        (1, (), []),  # nobody knows yet
        (2, (), [b'["of 1"]']),  # it waits for the others
        (2, (1, 0), [b'["of 2"]']),  # it is a spare host
        (3, (), []),  # attempt 2 made no step
    ],
)
def test_a_host_that_waits_imports_what_ranks_need(tmp_path, attempt, order, imports):
    store = open_store(str(tmp_path / "store"))
    boards = [Board(store, "train-1", number) for number in (1, 2, 3)]
    for board in boards:
        board.write("task.json", Task("train", 2, 1, 1).to_json())
        board.write("resolved.yaml", as_yaml(load("tiny")).encode())
        board.write("gang.json", json.dumps({"order": [1, 0]}).encode())
    boards[0].write("logs/1/modules.json.00000", b'["of 1"]')
    if order:
        boards[1].write("logs/1/modules.json.00000", b'["of 2"]')
    prepared = []
    torchrun: Any = SimpleNamespace(prepared=False, asked=-math.inf)
    torchrun.prepare = lambda modules, environment, count: prepared.append(modules)
    word, me = Word("c", "go" if order else "gathering", order=order), Member("m", "host", "waiting", "127.0.0.1")
    link: Any = SimpleNamespace(word=word, message=me)
    for _ in range(2):  # the second time is too early
        member._prepare(boards[attempt - 1], link, tmp_path, torchrun)
    assert prepared == imports
