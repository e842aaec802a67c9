"""Damage that a folder of inputs can take, as values: hypothesis draws them, and a failing one can be written down."""

import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Raw:
    """The file holds these bytes."""

    file: str
    content: bytes

    def apply(self, folder: Path) -> None:
        _free(folder / self.file).write_bytes(self.content)


@dataclass(frozen=True)
class Set:
    """A place in a JSON file, or in a safetensors header, holds this value."""

    file: str
    keys: tuple[str | int, ...]
    value: Any

    def apply(self, folder: Path) -> None:
        _edit(folder / self.file, lambda text: _replaced(text, self.keys, self.value))


@dataclass(frozen=True)
class Drop:
    file: str
    keys: tuple[str | int, ...]

    def apply(self, folder: Path) -> None:
        _edit(folder / self.file, lambda text: _without(text, self.keys))


@dataclass(frozen=True)
class Twice:
    """A key stands twice at the top of a JSON file."""

    file: str
    key: str
    value: Any

    def apply(self, folder: Path) -> None:
        first = f"{{{json.dumps(self.key)}: {json.dumps(self.value)}, ".encode()
        _edit(folder / self.file, lambda text: first + text.lstrip()[1:])


@dataclass(frozen=True)
class Flip:
    """One bit is another; `at` is a share of the file's length."""

    file: str
    at: float
    bit: int

    def apply(self, folder: Path) -> None:
        if not (content := bytearray(_content(folder / self.file))):
            return
        content[int(self.at * (len(content) - 1))] ^= 1 << self.bit
        _free(folder / self.file).write_bytes(content)


@dataclass(frozen=True)
class Cut:
    file: str
    at: float

    def apply(self, folder: Path) -> None:
        content = _content(folder / self.file)
        _free(folder / self.file).write_bytes(content[: int(self.at * len(content))])


@dataclass(frozen=True)
class Become:
    """Something else has the name: FIFO, folder, loop, nothing, device, gone, empty, huge, unreadable, folder of it."""

    file: str
    kind: str

    def apply(self, folder: Path) -> None:
        path = _free(folder / self.file)
        match self.kind:
            case "FIFO":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "loop":
                path.symlink_to(path.name)
            case "nothing":
                path.symlink_to("nowhere")
            case "device":
                path.symlink_to("/dev/zero")
            case "null":
                path.symlink_to("/dev/null")
            case "empty":
                path.write_bytes(b"")
            case "unreadable":
                path.write_bytes(b"{}")
                path.chmod(0)
            case "huge":
                with path.open("wb") as file:
                    file.truncate(2**27)  # a hole
            case "gone":
                pass


@dataclass(frozen=True)
class Say:
    """An override on the command line."""

    text: str

    def apply(self, folder: Path) -> None:
        """Change nothing in the folder: the caller puts the override on the command line."""


def _free(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and not path.is_symlink() and path.stat().st_size < 10**7 else b""


def _edit(path: Path, edit) -> None:
    """Edit the JSON of a file, or a safetensors file's header. A file that is no longer one of these stays as it is."""
    content = _content(path)
    start = struct.unpack("<Q", content[:8])[0] if path.suffix == ".safetensors" and len(content) > 8 else 0
    text, rest = (content[8 : 8 + start], content[8 + start :]) if start else (content, b"")
    try:
        text = edit(text)
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    _free(path).write_bytes((struct.pack("<Q", len(text)) if start else b"") + text + rest)


def _replaced(text: bytes, keys: tuple[str | int, ...], value: Any) -> bytes:
    found = [json.loads(text)]
    at: Any = found
    way = (0, *keys)
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = value
    return json.dumps(found[0]).encode()


def _without(text: bytes, keys: tuple[str | int, ...]) -> bytes:
    found = json.loads(text)
    at = found
    for key in keys[:-1]:
        at = at[key]
    del at[keys[-1]]
    return json.dumps(found).encode()
