"""Versions that the patches of this folder are written for. Any other is refused: a patch fits one upstream text.

Each module names its packages and versions in WRITTEN_FOR, and every function that changes a package calls check()
first. tests/trainer/patches has, for each patch, a test that fails once upstream has mended what the patch is for.
"""

import importlib.metadata
from collections.abc import Mapping

from contract.faults import Fault


def check(patch: str, written_for: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse installed packages that this patch, a module's name, is not written for."""
    for package, known in written_for.items():
        found = installed(package)
        if found not in known:
            raise Fault(
                f"{package} {found or 'is not installed'}: {patch.replace('.', '/')}.py is written for "
                f"{' and '.join(known)}; install that (make setup), or change the patch (docs/extending/patches.md)"
            )


def installed(package: str) -> str | None:
    """Version of a distribution, without its local part (+cpu, +cu130)."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
