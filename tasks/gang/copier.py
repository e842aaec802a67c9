"""Member's side of copies: a thread that copies this host's part of each requested checkpoint to the store.

A host's part has the files of its ranks, by the ranks in their names; the first host has all other files too. Before
the copy, the part is linked into a separate folder: training may remove old checkpoints meanwhile.
"""

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from contract import checkpoints
from contract.files import is_partial
from tasks.gang.copies import CHECKPOINTS, METRICS, Copies, encoded, part
from tasks.gang.member_link import Link
from tasks.store import open_store

TICK = 0.5
AGAIN, LONGEST = 2.0, 60.0  # seconds until the next try, if the store does not answer; they double
QUIET = 2.0  # seconds without a request after which a failed attempt has copied everything
OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")  # files of torch.distributed.checkpoint
SMALL = (METRICS, "parity*.json", "tensorboard/*")


class Copier:
    def __init__(self, link: Link, output: Path, ranks: range, first: bool, followed: tuple[str, ...]):
        self._link, self._output, self._ranks, self._first, self._followed = link, output, ranks, first, followed
        self._copies = Copies(open_store(link.board.store.uri), link.board.gang)
        self._linked = output.with_name(f"copies-{link.node}")
        shutil.rmtree(self._linked, ignore_errors=True)
        self._saved = self._handled = link.word.copied
        self._marks: dict[int, bytes] = {}  # by step: training may remove the file
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="copier")
        self._thread.start()

    def logs(self) -> dict[str, Path]:
        """Files that the controller follows like logs while they grow."""
        return {name: self._output / name for name in self._followed} if self._first else {}

    def finish(self, all_saved: bool, stop: Callable[[], bool]) -> None:
        """Finish the copies: of the last checkpoint after a finished training, else of the requested one."""
        last, quiet_since = max(self._steps(), default=0) if all_saved else 0, time.monotonic()
        while not stop():
            word = self._link.word
            if word.copied < max(word.copy, last, self._saved if self._first else 0):
                quiet_since = time.monotonic()
            elif all_saved or time.monotonic() - quiet_since > QUIET:
                break
            time.sleep(TICK)
        self._over.set()
        while all_saved and self._first and not stop():  # metrics and mark have changed since the copy
            try:
                self._write_small(self._link.word.copied)
                return
            except Exception as error:
                print(f"copies: {error}; again in {AGAIN:.0f} s", flush=True)
                time.sleep(AGAIN)

    def remove(self) -> None:
        """Remove the training from this host's disk."""
        shutil.rmtree(self._linked, ignore_errors=True)
        shutil.rmtree(self._output, ignore_errors=True)

    def _run(self) -> None:
        pause = AGAIN
        while not self._over.wait(TICK):
            try:
                if self._first:
                    self._report_saved()
                self._copy()
                self._prune()
                pause = AGAIN
            except Exception as error:
                print(f"copies: {error}; again in {pause:.0f} s", flush=True)
                self._over.wait(pause)
                pause = min(2 * pause, LONGEST)

    def _steps(self) -> list[int]:
        matches = (re.fullmatch(r"iter_(\d+)", path.name) for path in (self._output / CHECKPOINTS).glob("iter_*"))
        return sorted(int(match[1]) for match in matches if match)

    def _report_saved(self) -> None:
        """Report the newest checkpoint that is marked, and keep its files until it is copied or the next one is."""
        marks = {step: data for step in self._steps() if step > self._saved and (data := self._mark(step))}
        if marks and self._link_part(newest := max(marks)):
            self._marks |= marks
            self._saved = newest
            self._link.say(saved=newest)
        if (mark := self._mark(self._handled)) and mark != self._marks.get(self._handled):  # it was validated
            self._marks[self._handled] = mark
            self._write_small(self._handled)

    def _copy(self) -> None:
        step = self._link.word.copy
        if step <= max(self._link.word.copied, self._handled):
            return
        folder = self._linked / str(step)
        if folder.exists() or self._link_part(step):
            place = f"{self._copies.files}/{CHECKPOINTS}/{checkpoints.step_folder(Path(), step)}"
            files = self._copies.store.put(folder, place, kept=lambda _: True)
            if self._first:
                self._write_small(step)
            self._link.board.write(part(step, self._link.node), encoded(files))
        self._handled = step
        self._link.say(copied=step)

    def _link_part(self, step: int) -> bool:
        """Link this host's part into a separate folder. Returns False if the checkpoint is being removed."""
        source, target = checkpoints.step_folder(self._output / CHECKPOINTS, step), self._linked / str(step)
        shutil.rmtree(target, ignore_errors=True)
        names = self._part(source)
        try:
            target.mkdir(parents=True)
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / name, target / name)
        except FileNotFoundError:
            names = []
        if source.is_dir() and names == self._part(source):
            return True
        shutil.rmtree(target, ignore_errors=True)
        return False

    def _part(self, source: Path) -> list[str]:
        names = []
        for path in source.rglob("*"):
            of_rank = OF_RANK.fullmatch(path.name)
            own = int(of_rank[1]) in self._ranks if of_rank else self._first
            if own and path.is_file() and not is_partial(path.name) and path.name != checkpoints.MARK:
                names.append(str(path.relative_to(source)))
        return sorted(names)

    def _mark(self, step: int) -> bytes:
        """The mark of the checkpoint; empty if it is incomplete or removed."""
        with contextlib.suppress(FileNotFoundError):
            return (checkpoints.step_folder(self._output / CHECKPOINTS, step) / checkpoints.MARK).read_bytes()
        return b""

    def _write_small(self, step: int) -> None:
        for path in (path for pattern in SMALL for path in self._output.glob(pattern)):
            self._copies.write_small(step, str(path.relative_to(self._output)), path.read_bytes())
        self._copies.write_mark(step, self._mark(step) or self._marks[step])

    def _prune(self) -> None:
        """Remove unused links, and on other hosts than the first all copied checkpoints but one."""
        word = self._link.word
        needed = {str(step) for step in (word.copy, self._saved)} if word.copied < max(word.copy, self._saved) else {}
        for folder in self._linked.glob("*"):
            if folder.name not in needed:
                shutil.rmtree(folder, ignore_errors=True)
        for step in () if self._first else self._steps():
            if step < word.copied:
                shutil.rmtree(checkpoints.step_folder(self._output / CHECKPOINTS, step), ignore_errors=True)
