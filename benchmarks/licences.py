"""Print the licences of the installed packages, as their metadata states them.

    python -m benchmarks.licences     make licences

Each line has a licence and its packages, most frequent licence first. The licence is the metadata's SPDX expression,
else its line of text, else its classifiers, else the first line of a longer text. A package without any of these is
listed with its licence file.

The list does not cover code of other projects that is compiled into a wheel, nor models and data.
"""

import importlib.metadata
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import PurePath

from contract import closed_pipe
from flows import arguments


def stated(package: Distribution) -> str:
    """Return the licence that a package names."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return expression
    text = (about.get("License") or "").strip()
    if text and "\n" not in text:
        return text
    classes = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    return " and ".join(sorted(classes)) or text.partition("\n")[0] or f"not named; {_file(package)}"


def _file(package: Distribution) -> str:
    names = [file for file in package.files or [] if PurePath(file).stem.upper() in ("LICENSE", "LICENCE", "COPYING")]
    return f"its file: {names[0]}" if names else "no licence file"


def main(argv: Sequence[str] | None = None) -> None:
    arguments.parser("benchmarks.licences").parse_args(argv)
    found: dict[str, set[str]] = defaultdict(set)
    for package in importlib.metadata.distributions():
        if name := package.metadata["Name"]:  # a half-removed package leaves a folder without metadata
            found[stated(package)].add(f"{name} {package.version}")
    for licence, names in sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        print(f"{licence} ({len(names)}): {', '.join(sorted(names, key=str.lower))}")


if __name__ == "__main__":
    closed_pipe.run(main)
