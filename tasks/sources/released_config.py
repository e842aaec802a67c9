"""The config.json of a run's release, as far as a fingerprint depends on it."""

from functools import lru_cache
from typing import Any

from conf.planner import verdict
from conf.schema.model import Drawn
from conf.schema.run import Run
from tasks.sources import drawn, hub


def read(run: Run) -> dict[str, Any]:
    """The config.json of the commit or folder that the stage download fetches, or of the weights that are drawn."""
    source = run.model.source
    if isinstance(source, Drawn):
        return drawn.config(source, run.model.revision)
    if hub.kind(source) == "tiny":
        return verdict.config_of(run)[0]
    return _read(source, hub.resolve(source, run.model.revision).commit, run.model.revision)


@lru_cache
def _read(source: str, commit: str, revision: str) -> dict[str, Any]:
    return hub.config_json(source, commit if hub.kind(source) == "hub" else revision)
