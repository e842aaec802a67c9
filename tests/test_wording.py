"""Number of wordings that are hard to read for non-native speakers, in pages, strings and comments.

The number may only fall. Lower LIMIT whenever the number is smaller. A hit is not always a bad sentence.
"""

import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("contract", "conf", "flows", "tasks", "trainer")
LIMIT = 79
HARD = re.compile(
    r"\b(?:where (?:there|it|they|the|a|an|no|that|one)|behind|beside|(?:is|are|was) told|go(?:es|ne)? on"
    r"|of (?:its|their|our|one's) own|by (?:itself|themselves)|(?:is|are) no [a-z]+"
    r"|what (?:it|there|they|is|was|has|one)|whoever"
    r"|of which|so that|without a word|as (?:it|they) (?:is|are|was|were))\b",
    re.IGNORECASE,
)


def prose(path: Path) -> Iterator[str]:
    """Yield the text of a page, or each string and block of comments of a source file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield text
    elif path.suffix == ".yaml":
        yield " ".join(re.findall(r"#\s*(.*)", text))
    elif HARD.search(" ".join(text.replace("#", " ").split())):
        comment: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comment.append(token.string.lstrip("# "))
            elif token.type != tokenize.NL:
                yield " ".join(comment)
                comment = []
                if token.type in (tokenize.STRING, tokenize.FSTRING_MIDDLE):
                    yield token.string


def hits(root: Path) -> Counter[tuple[str, str]]:
    """Count each hit by its file and the words around it."""
    paths = [root / "README.md", *(root / "docs").rglob("*.md")]
    for folder in PRODUCT:
        paths += [path for suffix in ("py", "yaml") for path in (root / folder).rglob(f"*.{suffix}")]
    count: Counter[tuple[str, str]] = Counter()
    for path in paths:
        for text in prose(path):
            line = " ".join(text.split())
            for hit in HARD.finditer(line):
                count[str(path.relative_to(root)), line[max(0, hit.start() - 30) : hit.end() + 30]] += 1
    return count


def hits_at_limit(folder: Path) -> Counter[tuple[str, str]]:
    """Count the hits of the commit that last changed this file; nothing without git's history."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout

    try:
        commit = git("log", "-1", "--format=%H", "--", "tests/test_wording.py").decode().strip()
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "README.md", "docs", *PRODUCT))) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, subprocess.CalledProcessError):
        return Counter()
    return hits(folder)


def test_the_count_of_hard_wordings_only_falls(tmp_path: Path) -> None:
    count = hits(ROOT)
    total = count.total()
    if total <= LIMIT:
        return
    files: Counter[str] = Counter()
    for (path, _), number in count.items():
        files[path] += number
    worst = [f"  {number} {path}" for path, number in files.most_common(10)]
    new = [f"  {path}: ...{words}..." for path, words in count - hits_at_limit(tmp_path)]
    lines = [f"{total} hits, the limit is {LIMIT}. Most hits:", *worst, "New hits:", *new[:40]]
    raise AssertionError("\n".join(lines))


def test_each_kind_of_text_is_counted(tmp_path: Path) -> None:
    for folder in PRODUCT:
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("A key\nbeside another.\n")
    source = '"""What it is."""\n# Rows go\n# on here.\nbehind = f"{1} is told"\n'
    (tmp_path / "flows" / "a.py").write_text(source)
    (tmp_path / "conf" / "a.yaml").write_text("behind: 1  # so that\n")
    assert sorted(path for path, _ in hits(tmp_path)) == ["README.md", "conf/a.yaml", *["flows/a.py"] * 3]
