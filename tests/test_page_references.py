"""Every path, command and link in the pages exists; docs/reference/architecture.md shows the whole tree."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest

from conf.schema import run as schema
from flows.adopt.registry import STACKS

ROOT = Path(__file__).parents[1]
FILES = {".py", ".md", ".json", ".jsonl", ".yaml", ".txt"}
ARCHITECTURE = ROOT / "docs/reference/architecture.md"
FOLDERS = ("contract", "conf", "flows", "tasks", "trainer", "tests", "benchmarks")


def tree(page: str) -> list[str]:
    """Paths of a page's file tree: the code block that has flows/, an entry a line, its first word the name."""
    block = next((block for block in page.split("```")[1::2] if re.search(r"^\W*flows/", block, re.MULTILINE)), "")
    paths, open_folders = [], []
    for line in block.splitlines()[1:]:
        entry = line.lstrip(" │├└─")
        if not entry:
            continue
        column = len(line) - len(entry)
        open_folders = [(at, folder) for at, folder in open_folders if at < column]
        path = (open_folders[-1][1] if open_folders else "") + entry.split()[0]
        paths.append(path)
        if path.endswith("/"):
            open_folders.append((column, path))
    return paths


def test_the_architecture_page_shows_the_tree():
    git = ["git", "ls-files", *FOLDERS]
    listing = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("no git repository")
    tracked = [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    folders = {f"{folder}/" for name in tracked for folder in PurePath(name).parents[:-1]}
    entries = {*tracked, *folders}
    top = [name for name in sorted(entries) if name.rstrip("/").count("/") == 1 and not name.endswith("__init__.py")]
    shown = [entry for entry in tree(ARCHITECTURE.read_text()) if entry.partition("/")[0] in FOLDERS]

    assert [name for name in top if not any(fnmatch(name, entry) for entry in shown)] == [], (
        "not in the tree of docs/reference/architecture.md"
    )
    assert [entry for entry in shown if not any(fnmatch(name, entry) for name in entries)] == [], "not there"


def test_tree_is_read_in_either_drawing():
    drawn = "```\n├── flows/   what happens\n│   ├── finetune.py  the pipeline\n└── tests/\n    └── gpu/\n```"
    plain = "text\n```text\nflows/     what happens\n    finetune.py  the pipeline\n\ntests/\n    gpu/\n```\n"
    assert tree(drawn) == tree(plain) == ["flows/", "flows/finetune.py", "tests/", "tests/gpu/"]
    assert tree("```sh\nmake test\n```") == []


def pages() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))


def dead_references(text: str, place: Path) -> list[str]:
    """Paths, commands, make targets, links and keys of a page that do not exist."""
    found = []
    for name in re.findall(
        r"(?<![\w./-])((?:flows|tasks|trainer|conf|contract|tests|benchmarks|docs)/[\w/.-]*\w/?)", text
    ):
        if "..." not in name and not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists():
            found.append(name)
    for name in re.findall(r"python -m ((?:flows|tasks|trainer|conf|tests|benchmarks)[\w.]*\w)", text):
        path = ROOT / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            found.append(f"python -m {name}")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE):
        if (name := line[0] or line[1]) not in targets:
            found.append(f"make {name}")
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        target = place.parent / link if link else place
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link + (f"#{anchor}" if anchor else ""))
    # The page of errors has a typing error, and docs/extending/key.md adds a key.
    keys = {*schema.dotted_keys(), "train.stps", "train.label_smoothing"}
    if place.parent.name == "migrate":  # these pages also name keys of other stacks
        keys |= {key.rstrip("*") for stack in STACKS.values() for key in [*stack.keys, *stack.left_out]}
    sections = "|".join(schema.sections())
    for code in re.findall(r"`[^`\n]*`|^    .*$", text, re.MULTILINE):
        names = re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_]+\b(?![/.(])", code)
        found += [name for name in names if name not in keys and Path(name).suffix not in FILES]
    return found


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs write them."""
    without_code = re.sub(r"^(```|    ).*$", "", text, flags=re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_what_a_page_names_is_there():
    assert {str(page): dead for page in pages() if (dead := dead_references(page.read_text(), page))} == {}


def test_a_dead_reference_is_seen():
    page = "`trainer/gone.py`, conf/load.py, `python -m trainer.nothing`, `make nonsense`, [x](nowhere.md), `make test`"
    page += ", [y](README.md#nowhere), [z](#start), [w](#nowhere), `train.nothing=1`"
    assert dead_references(page, ROOT / "README.md") == [
        "trainer/gone.py",
        "python -m trainer.nothing",
        "make nonsense",
        "nowhere.md",
        "README.md#nowhere",
        "#nowhere",
        "train.nothing",
    ]


def test_pages_are_short():
    limits = {ROOT / "README.md": 100, ROOT / "docs/reference/keys.md": 10_000}  # make schema writes the keys
    lengths = {page: len(page.read_text().splitlines()) for page in pages() if page.name != "CONTRIBUTING.md"}
    assert {str(page): length for page, length in lengths.items() if length > limits.get(page, 150)} == {}
