"""Upstream versions that the patches of this folder are written for. A patch fits one upstream source; others are
refused.

written_for.yaml has the packages and versions of each module, and every function that changes a package calls check()
first. For each patch, tests/trainer/patches has a test that fails once upstream has fixed the bug.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from contract.faults import Fault

Packages = Mapping[str, Sequence[str]]  # versions by package

WRITTEN_FOR: dict[str, Packages] = yaml.safe_load(Path(__file__).with_name("written_for.yaml").read_text())


def check(patch: str, written_for: Packages | None = None) -> None:
    """Raise a Fault for an installed package that this patch (a module's name) is not written for.

    `written_for` replaces the table's packages.
    """
    name = patch.removeprefix(f"{__package__}.").replace(".", "/")
    for package, known in (written_for or WRITTEN_FOR[name]).items():
        version = installed(package)
        if version not in known:
            raise Fault(
                f"{package} {version or 'is not installed'}: {patch.replace('.', '/')}.py is written for "
                f"{' and '.join(known)}; install that (make setup), or change the patch (docs/extending/patches.md)"
            )


def installed(package: str) -> str | None:
    """Return the version of a distribution, without its local part (+cpu, +cu130)."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
