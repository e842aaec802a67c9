"""Reader of JSON lines and plain text: a row per line.

The file is cut at line ends, and a chunk carries its lines. Blank lines are not rows, but count as lines.

orjson parses about 1 GB/s. Lines that it refuses or would change go to json: NaN and Infinity are accepted, and
integers of any length stay exact. Both parsers keep the last value of a repeated key; such a row is bad.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from contract.faults import Fault
from trainer.data.read.compressed import reading_text
from trainer.data.rows import Bad, Row, Rows, show

Piece = tuple[int, Callable[[], Rows]]  # bytes of the file up to its end, and its rows
Parse = Callable[[bytes], Row | Bad]

LONGEST = 2**28  # bytes of a line or of a row; longer ones mean a damaged file
BLANK = b" \t\r\n\v\f"
HUGE = 2.0**63  # orjson converts integers of about this size to floats
SURROGATE = re.compile("[\ud800-\udfff]")


def pieces(path: Path, size: int, parse: Parse) -> Iterator[Piece]:
    with reading_text(path) as (stream, position):
        line = 1
        while blob := stream.read(size):
            if not blob.endswith(b"\n"):
                blob += bounded_line(stream, path)
            yield position(), partial(_load, path, line, blob, parse)
            line += blob.count(b"\n")


def _load(path: Path, first: int, blob: bytes, parse: Parse) -> Rows:
    lines = [(number, line) for number, line in enumerate(blob.split(b"\n"), first) if line.strip(BLANK)]
    return Rows([parse(line) for _, line in lines], f"{path}:", [number for number, _ in lines])


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


def bounded_line(stream: io.BufferedReader, path: Path) -> bytes:
    line = stream.readline(LONGEST)
    if len(line) == LONGEST and not line.endswith(b"\n"):
        begin = show(line[:50].decode(errors="replace"))
        raise Fault(f"{path}: a line of more than {LONGEST >> 20} MiB, which begins with {begin}")
    return line


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
