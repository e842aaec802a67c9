"""Import transformers 2 s faster.

transformers reads the metadata of all 350 installed packages to look up five
(https://github.com/huggingface/transformers/blob/main/src/transformers/utils/import_utils.py), and scans its 480 model
folders twice, in its own __init__ and in that of its models. Remove when it looks up only the packages it needs.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.patches import versions


def import_transformers() -> None:
    """Import transformers.models once, without unnecessary reads."""
    versions.check(__name__)
    everything = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: _Distributions(everything)
    from transformers.utils import import_utils

    importlib.metadata.packages_distributions = everything
    scan = import_utils.define_import_structure
    # transformers/__init__.py has made this call, and the result is cached.
    by_backend = scan(Path(import_utils.__file__).parents[1] / "models", prefix="models")
    import_utils.define_import_structure = lambda path: {
        backends: {name.removeprefix("models."): names for name, names in modules.items() if name.startswith("models.")}
        for backends, modules in by_backend.items()
    }
    import transformers.models  # noqa: F401

    import_utils.define_import_structure = scan


class _Distributions(dict):
    """Fast importlib.metadata.packages_distributions(): first looks for a distribution with the package's name."""

    def __init__(self, everything: Callable[[], Mapping[str, list[str]]]):
        super().__init__()
        self.everything = everything

    def __missing__(self, package: str) -> list[str]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return [package]
        return self.everything()[package]

    def get(self, package: str, default=None):
        try:
            return self[package]
        except KeyError:
            return default
