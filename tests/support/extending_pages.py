"""Code of the pages in docs/extending/, and a package of it."""

import re
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / f"docs/extending/{page}.md").read_text()
    return [textwrap.dedent(code) for code in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def package(folder: Path, page: str, *modules: str) -> None:
    """Write the Python blocks of the page as these modules, in this order, with the entry points of the page."""
    for module, code in zip(modules, blocks(page), strict=True):
        (folder / f"{module}.py").write_text(code)
    (text,) = blocks(page, "toml")
    declared = tomllib.loads(text)
    assert declared["tool"]["setuptools"]["py-modules"] == [*modules]
    groups = declared["project"]["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{key} = {names[key]}" for key in names))]
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
