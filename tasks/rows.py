"""Pairs of prompt and answer from where the configuration says: a JSON lines file, a folder of such, or the Hub.

Each row is checked as it is read: a fault names file, line and field. A row's split follows from its content alone, so
rows that are added later never move another.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Data
from tasks.faults import Fault

SPLITS = ("training", "validation", "test")


def is_file(source: str) -> bool:
    return Path(source).expanduser().exists()


def content(source: str) -> str:
    """Digest of a local source."""
    digest = hashlib.sha256()
    for file in _files(source):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def commit(data: Data) -> str:
    """The commit that the data set's revision names on the Hub now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from requests.exceptions import ConnectionError, Timeout

    assert data.source
    try:
        found = HfApi().dataset_info(data.source, revision=data.revision).sha
    except HFValidationError:
        raise Fault(f"data.source: {data.source}: no such file, and no data set's name on the Hub (org/name)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise Fault(
            f"data.source: {data.source}@{data.revision}: the Hub says {status}; check the name, the revision, and the "
            "token (hf auth login) of a private or gated data set"
        ) from None
    except (ConnectionError, Timeout, OSError) as error:
        raise Fault(f"data.source: {data.source}: the Hub cannot be reached ({type(error).__name__})") from None
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
    import datasets

    try:
        found = datasets.load_dataset(data.source, data.config, split=data.split, revision=revision, streaming=True)
    except ValueError as error:
        raise Fault(f"data.source: {data.source}: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(found, 1):
        yield _pair(row, data, f"{data.source} {data.split} row {number}")


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
    except ValueError as error:
        raise Fault(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Fault(f"{place}: a {type(row).__name__}, not an object")
    return row


def _pair(row: dict, data: Data, place: str) -> tuple[str, str]:
    values = []
    for key, column in (("data.input", data.input), ("data.output", data.output)):
        if column not in row:
            raise Fault(f"{place}: no column {column} ({key}); there are {', '.join(row)}")
        if not isinstance(row[column], str):
            raise Fault(f"{place}: {column}: a {type(row[column]).__name__}, not text")
        if not row[column].strip():
            raise Fault(f"{place}: {column}: empty")
        values.append(row[column])
    return values[0], values[1]
