"""First rows of a new configuration's data, by trainer/first_rows.py, which reads rows like stage prepare.

    look(run, model folder, folder) -> FirstRows      a Fault if they cannot be read

From S3, only the first object is fetched. A data set on the Hub is streamed.
"""

from dataclasses import replace
from pathlib import Path

from conf.schema.data import Data
from conf.schema.run import Run
from conf.schema.sections import Adapter, Evaluate, Layout
from conf.schema.training import Optimizer, Train
from contract import regular_files
from contract.first_rows import FirstRows
from tasks.run import launch
from tasks.sources import hub, row_sources

KEY = "data.source"
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def whole(source: str) -> str:
    """Return the source with the absolute path of local files, because a worker runs in another folder."""
    is_here = row_sources.kind(source, KEY) == "local"
    return regular_files.whole(source) if is_here else source


def look(run: Run, tokenizer: Path | None, folder: Path) -> FirstRows:
    """Inspect the rows. Files to download are written to `folder`; without a tokenizer, lengths are estimates."""
    folder.mkdir()
    source, share = _here(run.data, folder)
    paths = {"model": str(tokenizer or folder / "none"), "logs": str(folder), "data": str(folder / "data")}
    bare = {
        "adapter": Adapter(),
        "layout": Layout(),
        "train": Train(steps=1, global_batch=1),
        "optimizer": Optimizer(lr=1e-4),
        "evaluate": Evaluate(),
    }  # nothing else affects how rows are read
    alone = run.model_copy(update=bare).changed(data={**source, "packed": False}, paths=paths)
    launch.process(*launch.trainer("first_rows", alone, folder), lambda _: None, lambda: False, keep=HUB_TOKENS)
    found = FirstRows.read_from(folder / "first_rows.json")
    if share == 1:
        return found
    return replace(found, rows=round((found.rows or 0) / share), whole=False, places=[])


def _here(data: Data, folder: Path) -> tuple[dict[str, str], float]:
    """Return the data keys to change for this host, and the share of all rows, by bytes, that it reads."""
    assert data.source
    kind = row_sources.kind(data.source, KEY)
    if kind == "hub":  # a look-up of the commit gives the clearest error
        found = row_sources.identity(data.parts[0], KEY, folder / "digests.json")
        return {"revision": found["commit"]}, 1
    if kind != "s3":
        return {}, 1
    uri, objects = row_sources.row_objects(data.source, KEY)
    name = min(objects)
    hub.fetch_objects(uri, {name: objects[name]}, folder / "rows")
    sizes = {one: size for one, (size, _) in objects.items()}
    return {"source": str(folder / "rows" / name)}, sizes[name] / (sum(sizes.values()) or 1)
