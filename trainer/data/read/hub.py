"""Reader of a data set on the Hub, streamed by `datasets` at a commit; nothing is stored on this disk.

A chunk has 1,000 rows of any size. A stream is read in order, so rows of finished chunks are fetched again and dropped.
If these rows are at the start of the stream, they are not converted to Python objects. HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE apply. Not covered: data sets with a script, which `datasets` no longer runs.
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
SIGNED = re.compile(r"""(https?://[^\s?'"]+)\?[^\s'"]*""")  # a signed address gives access


def pieces(part: Part, done: Callable[[int], bool]) -> Iterator[Piece]:
    """Yield the pieces of a data set.

    The size of each piece is reported as 0, because it is unknown. done() is true only for chunks that exist.
    """
    first = 0
    while done(first):
        yield 0, partial(Rows, [], "", ())
        first += 1
    for number, values in enumerate(batched(_streamed(part, first * ROWS), ROWS), first):
        numbers = range(number * ROWS + 1, (number + 1) * ROWS + 1)
        yield 0, partial(Rows, list(values), f"{part.source} {part.split} row ", numbers)


def count(part: Part) -> int | None:
    """Return the number of rows of the split from the data set's description; None if it has none."""
    datasets = _imported()
    with _faults(part):
        splits = datasets.load_dataset_builder(part.source, part.config, revision=part.revision).info.splits or {}
    return splits[part.split].num_examples if part.split in splits else None


def _streamed(part: Part, skipped: int) -> Iterator[Row]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", part.source or ""):
        raise Fault(f"data.source: {part.source}: no such file, and not a name of a data set on the Hub (org/name)")
    datasets = _imported()
    options = {"split": part.split, "revision": part.revision, "streaming": True}
    with _faults(part):
        stream = datasets.load_dataset(part.source, part.config, **options)
        for row in stream.skip(skipped) if skipped else stream:
            yield {name: without_absent_keys(value) for name, value in row.items()}


def _imported() -> Any:
    """Import `datasets` without torch. It would import torch if possible, which takes 10 s and 700 MB."""
    if "torch" not in sys.modules:
        os.environ.setdefault("USE_TORCH", "0")
    import datasets

    datasets.disable_progress_bars()
    return datasets


@contextmanager
def _faults(part: Part) -> Iterator[None]:
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
            f"data.source: {source} {part.split} at {part.revision[:8]}: {line}; and no file or folder has this name"
        ) from None
