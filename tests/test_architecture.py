"""The rules of the tree that no linter knows: who imports whom, what modules are called and how long they get, and that
what the pages name is there: docs/architecture.md's file tree, and every path, command and link of every page.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parent.parent

# flows -> tasks -> conf <- trainer: a task reaches the trainer by starting a process.
OWN = {
    "flows": {"flows", "tasks", "conf"},
    "tasks": {"tasks", "conf"},
    "conf": {"conf"},
    "trainer": {"trainer", "conf"},
}
HEAVY = {"torch", "transformers", "megatron", "vllm", "transformer_engine"}
FOREIGN = {"flows": HEAVY, "tasks": HEAVY, "conf": HEAVY, "trainer": {"prefect", "mlflow"}}
STAND_IN = ROOT / "trainer/cpu/stand_in"  # named as the library it stands in for names its modules

MODULES = sorted(path for folder in OWN for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a module imports, in functions too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = [*above, *filter(None, [node.module])]
            yield from ((node.lineno, ".".join([*source, alias.name])) for alias in node.names)


def trespasses(path: Path) -> list[str]:
    name = path.relative_to(ROOT)
    closed = ({*OWN, "tests"} - OWN[name.parts[0]]) | FOREIGN[name.parts[0]]
    return [f"{name}:{line} imports {what}" for line, what in imports(path) if what.partition(".")[0] in closed]


def test_imports_point_one_way():
    assert [trespass for path in MODULES for trespass in trespasses(path)] == []


def test_trespassing_is_seen_in_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "tasks").mkdir()
    module = tmp_path / "tasks/stages/train.py"
    module.write_text(
        "import os, torch.nn\nfrom flows import plan\ndef f():\n    from .. import conf, trainer\n    import conf\n"
    )
    assert trespasses(module) == [
        "tasks/stages/train.py:1 imports torch.nn",
        "tasks/stages/train.py:2 imports flows.plan",
        "tasks/stages/train.py:4 imports trainer",
    ]


def test_host_side_starts_without_the_trainer_s_libraries():
    """What is imported indirectly counts too; and importing does nothing else."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if path.relative_to(ROOT).parts[0] != "trainer" and path.stem not in ("__init__", "__main__")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_say_what_a_module_is_about():
    vague = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
    names = [path.relative_to(ROOT) for path in MODULES if STAND_IN not in path.parents]
    assert [str(name) for name in names if vague & {*name.parts, name.stem}] == []


def test_a_module_has_one_subject():
    """That is about 300 lines; past 350 there are two."""
    assert [str(path.relative_to(ROOT)) for path in MODULES if len(path.read_text().splitlines()) > 350] == []


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
    git = ["git", "ls-files", *OWN, "tests"]
    listing = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("no git repository")
    tracked = [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    folders = {f"{folder}/" for name in tracked for folder in PurePath(name).parents[:-1]}
    entries = {*tracked, *folders}
    top = [name for name in sorted(entries) if name.rstrip("/").count("/") == 1 and not name.endswith("__init__.py")]
    shown = [
        entry
        for entry in tree((ROOT / "docs/architecture.md").read_text())
        if entry.partition("/")[0] in {*OWN, "tests"}
    ]

    assert [name for name in top if not any(fnmatch(name, entry) for entry in shown)] == [], (
        "not in the tree of docs/architecture.md"
    )
    assert [entry for entry in shown if not any(fnmatch(name, entry) for name in entries)] == [], "not there"


def test_tree_is_read_in_either_drawing():
    drawn = "```\n├── flows/   what happens\n│   ├── finetune.py  the pipeline\n└── tests/\n    └── gpu/\n```"
    plain = "text\n```text\nflows/     what happens\n    finetune.py  the pipeline\n\ntests/\n    gpu/\n```\n"
    assert tree(drawn) == tree(plain) == ["flows/", "flows/finetune.py", "tests/", "tests/gpu/"]
    assert tree("```sh\nmake test\n```") == []


def redrawn(path: Path) -> Iterator[int]:
    """Lines of loops that draw each element from a generator made anew of what the loop does not change: all equal."""
    for loop in ast.walk(ast.parse(path.read_text())):
        if not isinstance(loop, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            continue
        changed = {node.id for node in ast.walk(loop.generators[-1].target) if isinstance(node, ast.Name)}
        parts = [loop.key, loop.value] if isinstance(loop, ast.DictComp) else [loop.elt]
        for call in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
            if name in ("Random", "default_rng", "Generator", "manual_seed", "seed") and not used & changed:
                yield call.lineno


def test_no_test_draws_one_element_many_times():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in (ROOT / "tests").rglob("*.py") for line in redrawn(path)]
    assert found == []


def test_an_element_drawn_many_times_is_seen(tmp_path):
    module = tmp_path / "test_drawn.py"
    module.write_text(
        "rows = [[Random(row).randrange(9) for _ in range(4)] for row in range(2)]\n"
        "good = [Random(row).randrange(9) for row in range(2)]\n"
        "same = {n: np.random.default_rng(0).random() for n in range(2)}\n"
    )
    assert sorted(redrawn(module)) == [1, 3]


def pages() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))


def dead_references(text: str, place: Path) -> list[str]:
    """Paths, commands, make targets and links of a page that lead nowhere."""
    found = []
    for name in re.findall(r"(?<![\w./-])((?:flows|tasks|trainer|conf|contract|tests|docs)/[\w/.-]*\w/?)", text):
        if "..." not in name and not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists():
            found.append(name)
    for name in re.findall(r"python -m ((?:flows|tasks|trainer|conf|tests)[\w.]*\w)", text):
        path = ROOT / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            found.append(f"python -m {name}")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE):
        if (name := line[0] or line[1]) not in targets:
            found.append(f"make {name}")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        if not (place.parent / link).exists():
            found.append(link)
    return found


def test_what_a_page_names_is_there():
    assert {str(page): dead for page in pages() if (dead := dead_references(page.read_text(), page))} == {}


def test_a_dead_reference_is_seen():
    page = "`trainer/gone.py`, conf/load.py, `python -m trainer.nothing`, `make nonsense`, [x](nowhere.md), `make test`"
    assert dead_references(page, ROOT / "README.md") == [
        "trainer/gone.py",
        "python -m trainer.nothing",
        "make nonsense",
        "nowhere.md",
    ]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
