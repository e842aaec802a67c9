"""Arguments of datasets.load_dataset, which several stacks pass on: a name, or a format and files."""

from typing import Any

from flows.adopt.stack import NoCounterpartError, Target

FORMATS = ("json", "csv", "parquet", "text", "arrow")


def _named(value: Any) -> dict[str, Any]:
    return {} if value in FORMATS else {"datasets": value}


def _training(value: Any) -> dict[str, Any]:
    """Read files; of several splits, those of training."""
    if isinstance(value, dict) and "train" not in value:
        raise NoCounterpartError("no split named train")
    return {"datasets": value["train"] if isinstance(value, dict) else value}


NAME: Target = ("data.source, data.mixture", _named)
FILES: Target = ("data.source, data.mixture", _training)
