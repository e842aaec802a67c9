"""Reader of JSON lines and plain text: a row per line.

The file is cut at line ends, and a chunk carries its lines. Blank lines are not rows, but count as lines.

Python's json module parses 30 to 65 MB/s. It accepts NaN and Infinity and keeps integers of any length exact. It would
keep the last value of a repeated key; here a row with a repeated key is bad.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contract.faults import Fault
from trainer.data.read.compressed import reading_text
from trainer.data.rows import Bad, Refused, Row, Rows, show

Piece = tuple[int, Callable[[], Rows]]  # bytes of the file up to its end, and its rows
Parse = Callable[[bytes], Row | Bad]

LONGEST = 2**28  # bytes of a line or of a row; longer ones mean a damaged file
BLANK = b" \t\r\n\v\f"
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
        row = json.loads(line.decode().rstrip(), object_pairs_hook=_once)
        _require_whole_texts(row, "")
    except Refused as error:
        return error.bad
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
    return row if isinstance(row, dict) else Bad("not an object with columns", shown=show(row))


def bounded_line(stream: io.BufferedReader, path: Path) -> bytes:
    line = stream.readline(LONGEST)
    if len(line) == LONGEST and not line.endswith(b"\n"):
        begin = show(line[:50].decode(errors="replace"))
        raise Fault(f"{path}: a line of more than {LONGEST >> 20} MiB, which begins with {begin}")
    return line


def _require_whole_texts(value: Any, field: str) -> None:
    """Refuse a string with half of a surrogate pair, which UTF-8 cannot encode."""
    if isinstance(value, str):
        if half := SURROGATE.search(value):
            raise Refused(
                Bad("half of a surrogate pair", field, ascii(value[max(0, half.start() - 20) : half.start() + 10]))
            )
    elif isinstance(value, dict):
        for key, inner in value.items():
            _require_whole_texts(key, field)
            _require_whole_texts(inner, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _require_whole_texts(inner, f"{field}[{number}]")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object in which a key occurs twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise Refused(Bad("a key occurs twice", next(key for key in keys if keys.count(key) > 1)))
    return row
