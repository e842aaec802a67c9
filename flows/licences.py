"""The licences of the installed packages, as each package states its own.

    python -m flows.licences          make licences

A line per licence with the packages that name it, most frequent first. A package names it in its metadata: as an SPDX
expression, else as a line of text, else by classifiers, else as a text of many lines, of which the first is shown. What
names none is listed with the licence file that it brings.

Not covered: what a wheel has compiled in from others, and models or data, which have licences of their own.
"""

import importlib.metadata
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import PurePath

from contract import closed_pipe
from flows import arguments


def stated(package: Distribution) -> str:
    """The licence that a package names."""
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
    return f"its file: {names[0]}" if names else "it brings no licence file"


def main(argv: Sequence[str] | None = None) -> None:
    arguments.parser("licences").parse_args(argv)
    found: dict[str, set[str]] = defaultdict(set)
    for package in importlib.metadata.distributions():
        if name := package.metadata["Name"]:  # a half-removed package leaves a folder without metadata
            found[stated(package)].add(f"{name} {package.version}")
    for licence, names in sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        print(f"{licence} ({len(names)}): {', '.join(sorted(names, key=str.lower))}")


if __name__ == "__main__":
    closed_pipe.run(main)
