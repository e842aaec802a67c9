"""Pairs of prompt and answer from where the configuration says: a JSON lines file, a folder of such, or the Hub.

Each row is checked as it is read: a fault names file, line and field. A row's split follows from its content alone, so
rows that are added later never move another.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Data
from tasks.faults import Fault
from tasks.hub import api

SPLITS = ("training", "validation", "test")
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_file(source: str) -> bool:
    return Path(source).expanduser().exists()


def content(source: str) -> str:
    """Digest of a local source."""
    digest = hashlib.sha256()
    for file in _files(source):
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise Fault(f"data.source: {file}: {error.strerror}") from None
    return digest.hexdigest()


def commit(data: Data) -> str:
    """The commit that the data set's revision names on the Hub now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    assert data.source
    try:
        found = HfApi(endpoint=api.endpoint()).dataset_info(data.source, revision=data.revision, timeout=30).sha
    except HFValidationError:
        raise Fault(f"data.source: {data.source}: no such file, and no data set's name on the Hub (org/name)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise Fault(
            f"data.source: {data.source}@{data.revision}: the Hub says {status}; check the name, the revision, and the "
            "token (hf auth login) of a private or gated data set"
        ) from None
    except Exception as error:
        raise api.fault(error, f"data.source: {data.source}", data.revision) from None
    assert found
    return found


def read(data: Data, revision: str | None) -> Iterator[tuple[str, str]]:
    """Every pair, at a commit of the Hub or from local files."""
    assert data.source
    if revision is None:
        for file in _files(data.source):
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield _pair(_parse(line, f"{file}:{number}"), data, f"{file}:{number}")
        return
    for number, row in enumerate(_streamed(data, revision), 1):
        yield _pair(row, data, f"{data.source} {data.split} row {number}")


def _streamed(data: Data, revision: str) -> Iterator[dict]:
    import datasets
    from datasets.exceptions import DatasetsError

    assert data.source
    try:
        yield from datasets.load_dataset(data.source, data.config, split=data.split, revision=revision, streaming=True)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:  # no such split, not a table, a script
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise Fault(f"data.source: {data.source} {data.split} at {revision[:8]}: {line}") from None


def split(pair: tuple[str, str], data: Data) -> str:
    """By a hash of the content: validation and test get their shares, training the rest."""
    digest = hashlib.sha256("\0".join(pair).encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    if place < data.test:
        return "test"
    return "validation" if place < data.test + data.validation else "training"


def _files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    files = sorted([*path.glob("*.jsonl"), *path.glob("*.json")])
    if not files:
        raise Fault(f"data.source: {source}: no *.jsonl in this folder")
    return files


def _parse(line: bytes, place: str) -> dict:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise Fault(f"{place}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise Fault(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Fault(f"{place}: {_show(row)} is no object with columns")
    return row


def _pair(row: dict, data: Data, place: str) -> tuple[str, str]:
    values = []
    for key, column in (("data.input", data.input), ("data.output", data.output)):
        if column not in row:
            raise Fault(f"{place}: no column {column} ({key}); there are {', '.join(row) or 'none'}")
        if not isinstance(row[column], str):
            raise Fault(f"{place}: {column}: {_show(row[column])} is no text")
        if not row[column].strip():
            raise Fault(f"{place}: {column}: empty")
        if _SURROGATE.search(row[column]):
            raise Fault(f"{place}: {column}: half of a surrogate pair, which UTF-8 cannot hold")
        values.append(row[column])
    return values[0], values[1]


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda other: f"a {type(other).__name__}")
    return text if len(text) <= 60 else f"{text[:60]}..."
