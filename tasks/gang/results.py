"""Output of an evaluation on a host that does not share FINETUNE_RUNS: the first member puts it on the board.

gangs/<gang>/<attempt>/results/...      its files
                      /results.json     their record
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tasks.gang.board import Board
from tasks.gang.copies import decoded, encoded
from tasks.gang.member_link import Link
from tasks.store import open_store

FOLDER, RECORD = "results", "results.json"
AGAIN = 2.0  # seconds until the next try, if the store does not answer


class Results:
    """Member's side, with the methods of Copier."""

    def __init__(self, link: Link, output: Path, first: bool, followed: tuple[str, ...]):
        self._link, self._output, self._first, self._followed = link, output, first, followed
        shutil.rmtree(output, ignore_errors=True)  # of an earlier attempt

    def logs(self) -> dict[str, Path]:
        return {name: self._output / name for name in self._followed} if self._first else {}

    def finish(self, is_done: bool, stop: Callable[[], bool]) -> None:
        while is_done and self._first and not stop():
            try:
                _put(self._link.board, self._output)
                return
            except Exception as error:
                print(f"results: {error}; again in {AGAIN:.0f} s", flush=True)
                time.sleep(AGAIN)

    def remove(self) -> None:
        shutil.rmtree(self._output, ignore_errors=True)


def _put(board: Board, output: Path) -> None:
    board.write(RECORD, encoded(open_store(board.store.uri).put(output, f"{board.place}/{FOLDER}")))


def fetch(board: Board, output: Path) -> None:
    """Fetch the results of an attempt, if they are on its board."""
    if entry := board.store.read(f"{board.place}/{RECORD}"):
        open_store(board.store.uri).get(f"{board.place}/{FOLDER}", decoded(entry[0]), output)
