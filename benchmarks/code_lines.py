"""Code lines of each folder, without comments, docstrings and blank lines, compared with an earlier commit.

A text right after an attribute is a docstring too, as in PEP 257: each key of a configuration has one.

    python -m benchmarks.code_lines                     the product, its tests and benchmarks
    python -m benchmarks.code_lines --before COMMIT     next to the lines of that commit
    python -m benchmarks.code_lines --top 10            the largest folders of the product too, two levels deep

The output is a table in Markdown. It counts files that git tracks.
"""

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("contract", "conf", "flows", "tasks", "trainer")
SPACE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Return the number of lines with a token that is neither a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, *SPACE):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED):
            for docstring in _docstrings(node):
                lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Expr]:
    """Texts without effect: the first statement, and those after an attribute of a class or of a module."""
    for before, statement in pairwise([None, *node.body]):
        attribute = isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef)
        if not isinstance(statement, ast.Expr) or not (before is None or attribute):
            continue
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            yield statement


def counts(texts: Iterator[tuple[str, str]]) -> Counter[str]:
    """Lines by folder: each file counts for its top folder, with a slash, and for the folder of two levels."""
    lines: Counter[str] = Counter()
    for name, text in texts:
        top, *rest = name.split("/")
        number = code_lines(text)
        lines[f"{top}/"] += number
        if len(rest) > 1:
            lines[f"{top}/{rest[0]}/"] += number
    return lines


def tracked(commit: str | None) -> Iterator[tuple[str, str]]:
    """Name and text of each Python file of the working tree, or of a commit."""
    if commit:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            for member in files:
                if _counted(member.name) and (file := files.extractfile(member)):
                    yield member.name, file.read().decode()
        return
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listing.splitlines():
        if _counted(name) and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text("utf-8")


def _counted(name: str) -> bool:
    return name.endswith(".py") and name.split("/")[0] in (*PRODUCT, "tests", "benchmarks")


def table(now: Counter[str], before: Counter[str] | None, top: int) -> str:
    """Return the sums, and the largest folders of the product, as a table in Markdown."""
    states = [now] if before is None else [now, before]
    sums = {"product": PRODUCT, "tests": ("tests",), "benchmarks": ("benchmarks",)}
    rows = [
        (f"**{kind}**", *(sum(lines[f"{top}/"] for top in tops) for lines in states)) for kind, tops in sums.items()
    ]
    folders = [name for name, _ in now.most_common() if name.count("/") == 2 and name.split("/")[0] in PRODUCT]
    rows += [(f"`{name}`", *(lines[name] for lines in states)) for name in folders[:top]]
    heads = ["folder", "code lines", "before"][: len(states) + 1]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code_lines", description="Count the lines of code.")
    parser.add_argument("--before", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="add the N largest folders of the product")
    arguments = parser.parse_args()
    before = counts(tracked(arguments.before)) if arguments.before else None
    print(table(counts(tracked(None)), before, arguments.top))


if __name__ == "__main__":
    main()
