"""Marks of complete checkpoints. A mark is written last, and lists every file with its size.

Megatron's tracker file names the newest checkpoint, but does not show whether it is complete. A mark is renamed into
place after every rank has written and synced. A folder without a mark is left from an interrupted save.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from contract import json_object
from contract.faults import Fault
from contract.files import is_partial, write_atomically
from contract.output_marks import MARKER

MARK = "complete.json"
MEANS = "ema"  # folder in a checkpoint with the moving mean of its weights


def mark(folder: Path, **facts) -> None:
    """Declare the checkpoint in this folder complete. The mark contains `facts` and the list of files."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not is_partial(path.name))
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    for name in (MARK, MARKER):
        files.pop(name, None)
    write_atomically(folder / MARK, json.dumps({**facts, "files": files}, indent=1), durable=True)


def read_mark(folder: Path) -> dict | None:
    """Return the facts in the mark of a complete checkpoint; None if the mark or a file is missing or truncated."""
    try:
        facts = json_object.read(folder / MARK)
        whole = all((folder / name).stat().st_size == size for name, size in facts["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # another program's file, or an edited one
        return None
    return facts if whole else None


def require(folder: Path, what: str, remedy: str) -> dict:
    """Return the facts of a checkpoint that a command needs. Raise a Fault with the remedy if it is not complete."""
    if not folder.is_dir():
        raise Fault(f"{folder}: no such folder; {what} is made by {remedy}")
    facts = read_mark(folder)
    if facts is None:
        raise Fault(f"{folder}: not a complete checkpoint (no valid {MARK}); make {what} again by {remedy}")
    return facts


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a training run's folder, oldest first."""
    return sorted(step for step, path in _iterations(folder) if read_mark(path))


def best(folder: Path) -> tuple[int, float] | None:
    """Return step and loss of the complete checkpoint with the lowest validation loss; None if none was validated."""
    marks = {step: read_mark(path) or {} for step, path in _iterations(folder)}
    losses = {step: mark.get("validations", {}).get("loss") for step, mark in marks.items()}
    validated = [(step, loss) for step, loss in sorted(losses.items()) if loss is not None]
    return min(validated, key=lambda pair: pair[1], default=None)


def remove_older(folder: Path, keep: int, best: int | None) -> None:
    """Delete all complete checkpoints except the `keep` newest and the best one."""
    for step in complete_steps(folder)[:-keep]:
        if step != best:
            shutil.rmtree(step_folder(folder, step))


def remove_incomplete(folder: Path) -> list[str]:
    """Delete the folders of interrupted saves, which would fill the disk. Return their names.

    Several ranks may call it at the same time.
    """
    broken = [path for _, path in _iterations(folder) if read_mark(path) is None]
    for path in broken:
        shutil.rmtree(path, onexc=_unless_gone)
    return [path.name for path in broken]


def _unless_gone(function: Callable, path: str, error: BaseException) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def _iterations(folder: Path):
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"iter_(\d+)", path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in matches if match]
