"""Marks of output folders: only this project's output may be replaced, and the paths of one command must not overlap.

    problems(place, BASE)           reasons why a converted model must not be written there; empty if it may
    meetings(inputs, outputs)       lines about paths that are equal, contain each other, or are links to such paths
    begin(folder, BASE)             creates the folder and marks it, before anything else is written into it
    put_in_place(made, place, BASE) gives a finished folder its name, and removes the previous folder
    remove(folder, BASE)            removes a folder, if it is output of this kind

A folder is recognised by its mark: the file that is written last into complete output (complete.json, prepared.json),
or the file MARKER, which is written first and marks unfinished output. Output that is replaced as a whole may contain
only files that its mark lists: if there is another file, the message names it and nothing is replaced. Training and
evaluation write into their folder and ignore all other files in it.

Not covered: a file that is added while its folder is removed.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from contract import json_object
from contract.faults import Fault
from contract.files import is_partial, sync, write_atomically

MARKER = ".finetune"
OWNER = ".owner."  # contract/ownership.py: the process that writes there now
PARTIAL = ".partial"  # suffix of the folder for new output that will replace the old folder as a whole
JOURNAL = "unfinished"  # folder in it, with a file for each finished part
ASIDE = ".replaced"  # suffix of the previous output, on a file system that cannot exchange two names
LONGEST = 255 - len("-preparing")  # bytes of a name
AT_FDCWD, RENAME_EXCHANGE = -100, 2
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Kind:
    """A kind of output, and its mark."""

    what: str
    maker: str  # the module that writes it
    marks: Mapping[str, Set[str]]  # identifying files, and keys in their first line; the first marks complete output
    whole: bool = True  # replaced as a whole, by a new folder next to it
    names: tuple[str, ...] = ()  # patterns of the maker's files in the folder, if the mark does not list them

    @property
    def mark(self) -> str:
        return next(iter(self.marks))


BASE = Kind("a converted model", "trainer.convert", {"complete.json": {"architecture", "files"}})
EXPORT = Kind("an exported model", "trainer.export", {"complete.json": {"formats", "files"}})
DATA = Kind("prepared data", "trainer.prepare", {"prepared.json": {"settings", "sources", "files"}})
PREPARING = Kind(
    "an unfinished preparation",
    "trainer.prepare",
    {"identity.json": {"settings", "sources"}},
    names=("identity.json", "progress.jsonl", "files", "old", "*.chunk", "*-[0-9]*-[0-9]*.[0-9]*"),
)
_OF_TRAINING = {
    "metrics.jsonl": {"kind", "step"},
    "checkpoints/iter_*/complete.json": {"step", "files"},
    "data/prepared.json": DATA.marks["prepared.json"],
    "data-preparing/identity.json": PREPARING.marks["identity.json"],
}
TRAINING = Kind("a training run", "trainer.train", _OF_TRAINING, whole=False)
_OF_REINFORCEMENT = {**_OF_TRAINING, "rollouts/of.json": {"steps", "samples"}}
REINFORCEMENT = Kind("a reinforcement learning", "trainer.reinforce", _OF_REINFORCEMENT, whole=False)
_OF_REFERENCE = {"references.json": {"objective", "rows", "base"}, "progress.jsonl": {"split", "done", "total"}}
REFERENCE = Kind("what a reference says of rows", "trainer.reference", _OF_REFERENCE, whole=False)
_OF_EVALUATION = {"results.json": {"metrics", "rows", "samples"}, "progress.jsonl": {"done", "total", "what"}}
EVALUATION = Kind("an evaluation", "trainer.evaluate", _OF_EVALUATION, whole=False)
LOGS = Kind("logs", "", {}, whole=False)  # only ever appended to
PARITY = Kind("what training says of fixed prompts", "trainer.train", {"parity.json": {"step", "asked", "rows"}})


class Foreign(Fault):
    """The path contains something that this project has not made."""


def problems(place: str | Path, kind: Kind) -> Iterator[str]:
    """Yield reasons why this kind of output must not be written there. Each line begins with the path."""
    lines = _unusable(Path(place)) or _in_the_way(Path(place), kind) or _read_only(Path(place), kind)
    yield from (f"{place}: {line}" for line in lines)


def check_one(place: Path, kind: Kind) -> None:
    """Raise Foreign if an output must not be written there, for outputs without a key."""
    if lines := [*problems(place, kind)]:
        raise Foreign("\n".join(lines))


def take(folder: Path, kind: Kind) -> Path:
    """Create the folder, mark it as this project's and return it. Raise a Fault if it contains something else."""
    check_one(folder, kind)
    begin(folder, kind)
    return folder


def meetings(
    inputs: Mapping[str, Collection[str | Path]],
    outputs: Mapping[str, str | Path],
    nested: Collection[tuple[str, str]] = (),
) -> Iterator[tuple[str, str]]:
    """Yield outputs that would overwrite another path, with reasons. The first of a `nested` pair may be in the second.

    Folders are also compared by device and inode, to detect mounts and names that differ only in case.
    """
    spots = {name: _Spot.of(path) for name, path in outputs.items()}
    pairs = []
    for other, paths in inputs.items():
        found = [_Spot.of(path) for path in paths]
        for name, out in spots.items():
            if spot := next((spot for spot in found if out.relation(spot)), None):
                pairs.append((name, out, other, spot))
    pairs += [(name, out, other, spots[other]) for name, out in spots.items() for other in spots if other > name]
    for name, out, other, spot in pairs:
        relation = out.relation(spot)
        if ((name, other) in nested and relation == "inside") or ((other, name) in nested and relation == "around"):
            continue
        if relation:
            words = {"same": f"is {other} as well", "inside": f"lies inside {other}", "around": f"holds {other}"}
            shown = "" if relation == "same" and out.path == spot.path else f" ({spot.path})"
            yield name, f"{out.path}: {words[relation]}{shown}; every output needs a separate folder"


def begin(folder: Path, kind: Kind) -> None:
    """Create the folder, marked as this kind of output before anything else is written. It may run concurrently."""
    folder = Path(os.path.realpath(folder))  # follows a link whose target does not exist yet
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MARKER, json.dumps({"what": kind.what, "maker": kind.maker}) + "\n", durable=False)


def finished(folder: Path) -> None:
    """Remove the mark of unfinished output, after the mark of complete output was written."""
    (folder / MARKER).unlink(missing_ok=True)


def put_in_place(made: Path, place: Path, kind: Kind) -> None:
    """Give a finished folder its name, which always refers to the old or the new folder.

    Both folders must be on one file system.
    """
    if not os.path.lexists(place):
        made.rename(place)
    else:
        if lines := _in_the_way(place, kind):
            raise Foreign(f"{place}: {lines[0]}")
        _exchange(made, place, kind)
        remove(made, kind)
    sync(place.parent)


def recover(place: Path, kind: Kind) -> None:
    """Restore the name of an output after a crash during an exchange."""
    aside = place.with_name(place.name + ASIDE)
    if not os.path.lexists(place) and aside.is_dir() and is_made(aside, kind):
        aside.rename(place)


def remove(folder: Path, kind: Kind) -> None:
    """Remove the folder, if it exists and is this kind of output. The mark is removed last, so a crash leaves it."""
    if not os.path.lexists(folder):
        return
    if lines := _in_the_way(folder, kind):
        raise Foreign(f"{folder}: {lines[0]}")
    if any(folder.iterdir()) and not (folder / MARKER).exists():
        with contextlib.suppress(OSError):  # a full disk: removing makes space
            begin(folder, kind)
    for entry in [entry for entry in folder.iterdir() if entry.name != MARKER]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    finished(folder)
    folder.rmdir()


def is_made(folder: Path, kind: Kind) -> bool:
    """Whether the folder has a mark of this kind, of this version or an earlier one."""
    if _holds(folder / MARKER, {"what"}).get("what") == kind.what:
        return True
    return any(_holds(path, keys) for pattern, keys in kind.marks.items() for path in folder.glob(pattern))


def _unusable(place: Path) -> list[str]:
    """Return reasons why the path, or one of its parent folders, cannot be used."""
    if "\0" in str(place):
        return ["holds a null character"]
    limits = dict.fromkeys(place.parts[:-1], 255) | {place.name: LONGEST}
    for part, limit in limits.items():
        if (length := len(os.fsencode(part))) > limit:
            return [f"a name of {length} bytes ({part[:20]}...); at most {limit} are possible"]
    if len(os.fsencode(place.absolute())) > 3800:
        return [f"a path of {len(os.fsencode(place.absolute()))} bytes; at most 3800 are possible"]
    real = Path(os.path.realpath(place))
    if real.is_symlink():
        return ["a link that leads back to itself"]
    parent = _existing(real)
    if parent != real and not parent.is_dir():
        return [f"{parent} is a file, so nothing can lie inside it; name a folder"]
    return []


def _in_the_way(place: Path, kind: Kind) -> list[str]:
    """Return lines about content of this path that is not this kind of output."""
    real = Path(os.path.realpath(place))
    if not os.path.lexists(real):
        return []
    if kind is PARITY:
        made = real.is_file() and _holds(real, kind.marks[kind.mark])
        return [] if made else [f"is there, and is not {kind.what}; {_CHOOSE}"]
    mode = real.lstat().st_mode
    if not stat.S_ISDIR(mode):
        return [f"{'a file' if stat.S_ISREG(mode) else 'something'} is there, not a folder; {_CHOOSE}"]
    names = sorted(entry.name for entry in real.iterdir() if not _is_ours(entry.name))
    if kind is TRAINING:
        names = [name for name in names if not _holds_logs(real / name)]  # logs of a conversion
    if kind is LOGS or not names:
        return []
    if not is_made(real, kind):
        if kind is DATA and "training.jsonl" in names:
            return [
                "contains rows of the user (training.jsonl), which python -m trainer.train prepares; "
                "set another paths.data to prepare other rows"
            ]
        by = f"python -m {kind.maker}"
        return [f"contains {_some(names)}, not written by {by}, which replaces only {kind.what}; {_CHOOSE}"]
    if not kind.whole:
        return []
    foreign = _foreign(real, kind)
    return [f"contains {_some(foreign)} next to {kind.what}; move it elsewhere first"] if foreign else []


def _holds_logs(folder: Path) -> bool:
    return folder.is_dir() and all(
        fnmatch(entry.name, "rank[0-9]*.log") or entry.name == "preflight.json" for entry in folder.iterdir()
    )


def _foreign(folder: Path, kind: Kind) -> list[str]:
    """Return files in a folder of this kind that its maker has not written, according to the mark."""
    if kind.names:
        known = (*kind.names, f"{MARKER}*")
        names = (entry.name for entry in folder.iterdir() if not is_partial(entry.name))
        return sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in known))
    mark = _holds(folder / kind.mark, kind.marks[kind.mark])
    if not mark or (folder / MARKER).exists():
        return []  # unfinished: its files are not known yet
    files = mark["files"] if isinstance(mark["files"], list | dict) else ()  # a damaged mark lists no files
    listed = {kind.mark, f"{kind.mark}{PARTIAL}", *(name for name in files if isinstance(name, str))}
    present = []
    for here, _, names in os.walk(folder):
        present += [os.path.relpath(os.path.join(here, name), folder) for name in names]
    foreign = (name for name in present if name not in listed and not name.startswith(MARKER))
    return sorted(name for name in foreign if not is_partial(os.path.basename(name)))  # of a killed process


def _is_ours(name: str) -> bool:
    """Whether a file of an output's folder is an internal file of this project."""
    return name.startswith((MARKER, OWNER)) or is_partial(name)


def _read_only(place: Path, kind: Kind) -> list[str]:
    real = Path(os.path.realpath(place))
    if kind.whole and os.path.ismount(real):
        return ["a mount point, which cannot be replaced; name a folder inside it"]
    for folder in {real, real.parent} if kind.whole else {real}:
        there = _existing(folder)
        if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
            return [f"{there} cannot be written to; change its permissions, or {_CHOOSE}"]
    return []


_CHOOSE = "name another place, or move that elsewhere"


@dataclass(frozen=True)
class _Spot:
    """A path, with the data that show whether another path overlaps with it."""

    path: str
    real: Path
    id: tuple[int, int] | None
    above: frozenset[tuple[int, int]]  # ids of its parent folders

    @classmethod
    def of(cls, path: str | Path) -> "_Spot":
        real = Path(os.path.realpath(str(path).replace("\0", "")))
        return cls(str(path), real, _id(real), frozenset(id for above in real.parents if (id := _id(above))))

    def relation(self, other: "_Spot") -> str:
        if self.real == other.real or (self.id and self.id == other.id):
            return "same"
        if other.real in self.real.parents or other.id in self.above:
            return "inside"
        return "around" if self.real in other.real.parents or self.id in other.above else ""


def _id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _existing(path: Path) -> Path:
    return next(there for there in (path, *path.parents) if os.path.lexists(there))


def _holds(file: Path, keys: Set[str]) -> dict[str, Any]:
    """Return the JSON object in the file, or in its first line, if it has these keys; otherwise an empty one."""
    value = json_object.read_or_empty(file, first_line=file.suffix == ".jsonl")
    return value if keys <= value.keys() else {}


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _exchange(made: Path, place: Path, kind: Kind) -> None:
    """Exchange both names, in one step if the file system supports it.

    Otherwise it takes several steps; recover() repairs a crash between them.
    """
    done = LIBC.renameat2(AT_FDCWD, os.fsencode(made), AT_FDCWD, os.fsencode(place), RENAME_EXCHANGE)
    if done == 0:
        return
    if (error := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(error, os.strerror(error), str(place))
    aside = place.with_name(place.name + ASIDE)
    remove(aside, kind)
    place.rename(aside)
    made.rename(place)
    aside.rename(made)
