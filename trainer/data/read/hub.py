"""Reader of a data set on the Hub, as `datasets` streams it at a commit: nothing of it is kept on this disk.

A chunk is 1,000 rows, whatever their size. A stream is read in order: rows of chunks that are done are fetched and
dropped, those at its start without becoming Python's objects. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count. Not
covered: data sets that come as a script, which `datasets` itself no longer runs.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import batched
from typing import Any

from conf.schema.data import Part
from contract.faults import Fault
from trainer.data.read.lines import Piece
from trainer.data.read.tables import without_absent_keys
from trainer.data.rows import Row, Rows

ROWS = 1_000
SIGNED = re.compile(r"""(https?://[^\s?'"]+)\?[^\s'"]*""")  # whoever has such an address may read


def pieces(part: Part, commit: str | None, done: Callable[[int], bool]) -> Iterator[Piece]:
    """Pieces of a data set.

    Their bytes are not known, and so all 0. done() is true of no more chunks than there are.
    """
    first = 0
    while done(first):
        yield 0, partial(_load, part, first * ROWS, ())
        first += 1
    for number, values in enumerate(batched(_streamed(part, commit, first * ROWS), ROWS), first):
        yield 0, partial(_load, part, number * ROWS, values)


def count(part: Part) -> int | None:
    """Number of rows of the split, as the data set's description has it; None where that says nothing."""
    datasets = _imported()
    with _faults(part, part.revision):
        splits = datasets.load_dataset_builder(part.source, part.config, revision=part.revision).info.splits or {}
    return splits[part.split].num_examples if part.split in splits else None


def _load(part: Part, before: int, values: tuple[Row, ...]) -> Rows:
    return Rows(list(values), lambda row: f"{part.source} {part.split} row {before + row + 1}")


def _streamed(part: Part, commit: str | None, skipped: int) -> Iterator[Row]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", part.source or ""):
        raise Fault(f"data.source: {part.source}: no such file, and no data set's name on the Hub (org/name)")
    datasets = _imported()
    revision = commit or part.revision
    with _faults(part, revision):
        stream = datasets.load_dataset(part.source, part.config, split=part.split, revision=revision, streaming=True)
        for row in stream.skip(skipped) if skipped else stream:
            yield {name: without_absent_keys(value) for name, value in row.items()}


def _imported() -> Any:
    """Import `datasets` without torch, which it imports where it can: 10 s and 700 MB that are not needed here."""
    before = os.environ.get("USE_TORCH")
    if "torch" not in sys.modules:
        os.environ["USE_TORCH"] = "0"
    try:
        import datasets
    finally:
        os.environ.pop("USE_TORCH", None)
        if before is not None:
            os.environ["USE_TORCH"] = before
    datasets.disable_progress_bars()
    return datasets


@contextmanager
def _faults(part: Part, revision: str) -> Iterator[None]:
    import httpx
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, ValueError, OSError, RuntimeError, httpx.HTTPError) as error:
        # no such data set, configuration or split, not a table, a script, no network
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        line = SIGNED.sub(r"\1", line)
        source = f"{part.source} ({part.config})" if part.config else part.source
        raise Fault(
            f"data.source: {source} {part.split} at {revision[:8]}: {line}; and no file or folder has this name"
        ) from None
