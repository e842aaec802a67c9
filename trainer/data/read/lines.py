"""Reader of JSON lines and plain text: a row per line.

An uncompressed file is cut into ranges of bytes that end at a line end; the loader of a range reads it. A compressed
file is read here, and its chunks carry their lines. Blank lines are not rows, but count as lines.

orjson parses about 1 GB/s. Lines that it refuses or would change go to json: NaN and Infinity are accepted, and
integers of any length stay exact. Both parsers keep the last value of a repeated key; such a row is bad.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

from conf.schema.row_files import compression
from contract.faults import Fault
from trainer.data.read.compressed import BOM, faults, reading_text
from trainer.data.rows import Bad, Row, Rows, show

Piece = tuple[int, Callable[[], Rows]]  # bytes of the file up to its end, and its rows
Parse = Callable[[bytes], Row | Bad]

LONGEST = 2**28  # bytes of a line or of a row; longer ones mean a damaged file
BLANK = b" \t\r\n\v\f"
HUGE = 2.0**63  # orjson converts integers of about this size to floats
SURROGATE = re.compile("[\ud800-\udfff]")

# By file: modification time and size; bytes from its start, and the lines in them.
_counted: dict[Path, tuple[tuple[int, int], int, int]] = {}


def pieces(path: Path, size: int, parse: Parse) -> Iterator[Piece]:
    if compression(path):
        yield from _of_stream(path, size, parse)
    else:
        yield from _of_ranges(path, size, parse)


def text(line: bytes) -> Row | Bad:
    try:
        return {"text": line.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", "text", f"at byte {error.start}")


def json_object(line: bytes) -> Row | Bad:
    try:
        row = orjson.loads(line)
        if type(row) is dict:
            return _exact(line) if _has_huge(row.values()) or _quotes(line) != 2 * _texts(row) else row
        return Bad("not an object with columns", shown=show(row))
    except orjson.JSONDecodeError:
        return _exact(line)
    except RecursionError:  # orjson nests a little deeper than Python
        return Bad("not JSON", shown="nested too deeply")


def parsed(lines: list[bytes], parse: Parse) -> tuple[list[Row | Bad], list[int]]:
    """Return the rows of the lines, and the index of each among the lines."""
    values, numbers = [], []
    for number, line in enumerate(lines):
        if line and (line[0] not in BLANK or line.strip(BLANK)):
            values.append(parse(line))
            numbers.append(number)
    return values, numbers


def bounded_line(stream: io.BufferedReader, path: Path) -> bytes:
    line = stream.readline(LONGEST)
    if len(line) == LONGEST and not line.endswith(b"\n"):
        begin = show(line[:50].decode(errors="replace"))
        raise Fault(f"{path}: a line of more than {LONGEST >> 20} MiB, which begins with {begin}")
    return line


def _of_ranges(path: Path, size: int, parse: Parse) -> Iterator[Piece]:
    with reading_text(path) as (stream, _):
        end = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        start = len(BOM) if stream.read(len(BOM)) == BOM else 0
        while start < end:
            stream.seek(start + size - 1)
            bounded_line(stream, path)
            stop = min(stream.tell(), end)
            yield stop, partial(_load_range, path, start, stop, parse)
            start = stop


def _of_stream(path: Path, size: int, parse: Parse) -> Iterator[Piece]:
    with reading_text(path) as (stream, position):
        line = 1
        while blob := stream.read(size):
            if not blob.endswith(b"\n"):
                blob += bounded_line(stream, path)
            yield position(), partial(_load_lines, path, line, blob, parse)
            line += blob.count(b"\n")


def _load_range(path: Path, start: int, stop: int, parse: Parse) -> Rows:
    with faults(path), path.open("rb") as file:
        file.seek(start)
        blob = file.read(stop - start)
    if len(blob) != stop - start:
        raise Fault(f"{path}: became shorter while it was read")
    values, numbers = parsed(blob.split(b"\n"), parse)
    before = cache(lambda: _lines_before(path, start))
    return Rows(values, lambda row: f"{path}:{before() + numbers[row] + 1}")


def _load_lines(path: Path, first: int, blob: bytes, parse: Parse) -> Rows:
    values, numbers = parsed(blob.split(b"\n"), parse)
    return Rows(values, lambda row: f"{path}:{first + numbers[row]}")


def _lines_before(path: Path, start: int) -> int:
    """Return the number of lines before a position.

    Counting is done on demand, and continues from the last position.
    """
    with faults(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        stamp = status.st_mtime_ns, status.st_size
        before, at, lines = _counted.get(path, (stamp, 0, 0))
        if at > start or before != stamp:
            at, lines = 0, 0
        file.seek(at)
        while at < start:
            block = file.read(min(2**20, start - at))
            if not block:
                break
            at += len(block)
            lines += block.count(b"\n")
    _counted[path] = stamp, at, lines
    return lines


def _exact(line: bytes) -> Row | Bad:
    """Parse a line with json: for lines that orjson refuses or would change."""
    try:
        row = json.loads(line.decode().rstrip(), object_pairs_hook=_once)
    except _Repeated as error:
        return Bad("a key occurs twice", error.key)
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", shown=f"at byte {error.start}")
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :][:30]
        where = f"near {show(rest)}" if rest else f"its end, after {show(error.doc[-30:])}"
        return Bad("not JSON", shown=f"{error.msg} at character {error.pos}, {where}")
    except RecursionError:
        return Bad("not JSON", shown="nested too deeply")
    except ValueError as error:  # an integer of more than 4,300 digits
        return Bad("not JSON", shown=str(error).partition(";")[0])
    if bad_text := half_pair(row):
        return Bad("half of a surrogate pair", *bad_text)
    return row if isinstance(row, dict) else Bad("not an object with columns", shown=show(row))


def half_pair(value: Any, field: str = "") -> tuple[str, str] | None:
    """Return field and text of a string with half of a surrogate pair, which UTF-8 cannot encode."""
    if isinstance(value, str):
        half = SURROGATE.search(value)
        return (field, ascii(value[max(0, half.start() - 20) : half.start() + 10])) if half else None
    if isinstance(value, dict):
        for key, inner in value.items():
            if found := half_pair(key, field) or half_pair(inner, f"{field}.{key}" if field else key):
                return found
    if isinstance(value, list):
        for number, inner in enumerate(value):
            if found := half_pair(inner, f"{field}[{number}]"):
                return found
    return None


class _Repeated(ValueError):
    """A key that occurs twice in an object."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict[str, Any]()
    for key, value in pairs:
        if key in result:
            raise _Repeated(key)
        result[key] = value
    return result


def _quotes(line: bytes) -> int:
    """Return the number of quotes that begin or end a string."""
    line = line.replace(b"\\\\", b"") if b"\\\\" in line else line
    return line.count(b'"') - line.count(b'\\"')


def _texts(value: Any) -> int:
    """Return the number of keys and strings in a value."""
    kind = type(value)
    if kind is dict:
        return len(value) + sum(map(_texts, value.values()))
    return sum(map(_texts, value)) if kind is list else kind is str


def _has_huge(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is float:
            if not -HUGE < value < HUGE:
                return True
        elif (kind is dict and _has_huge(value.values())) or (kind is list and _has_huge(value)):
            return True
    return False
