"""The rules of the tree that no linter knows: who imports whom, what a module may be called, how many share a room.

Imports count wherever they stand, in functions and below TYPE_CHECKING too. Each rule is a function of the tree's root,
and is tried on a planted violation.
"""

import ast
import functools
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A task reaches the trainer by starting a process.
OWN = {
    "flows": {"flows", "tasks", "conf", "contract"},
    "tasks": {"tasks", "conf", "contract"},
    "trainer": {"trainer", "conf", "contract"},
    "conf": {"conf", "contract"},
    "contract": {"contract"},
}
HEAVY = {"torch", "transformers", "megatron", "vllm", "transformer_engine"}
FOREIGN = {
    "flows": HEAVY,
    "tasks": HEAVY,
    "conf": HEAVY | {"prefect", "mlflow", "boto3"},
    "trainer": {"prefect", "mlflow"},
}
# Rooms of a folder from top to bottom: each may import those of the lines below its own. A module that lies directly in
# trainer/ is a command; one directly in conf/ is a room by itself.
ROOMS = {
    "conf": [
        {"network", "overrides"},
        {"load"},
        {"planner"},
        {"rules", "noise"},
        {"schema", "alternatives"},
        {"model_facts", "peft_adapter"},
        {"families"},
        {"model_files", "error_lines", "rewards", "host"},
        {"strict_yaml"},
    ],
    "tasks": [{"serving"}, {"stages"}, {"gang", "servers"}, {"run", "sources"}, {"store", "tracking", "pages"}],
    "trainer": [
        {"commands"},
        {"proof", "reference"},
        {"rehearsal", "checks"},
        {"reinforcement"},
        {"objectives"},
        {"training"},
        {"weights", "serving"},
        {"megatron"},
        {"data", "profiling"},
        {"hosts", "startup"},
        {"patches"},
    ],
}
MOST = 24  # modules of a folder, above which it is reported
LONGEST = 500  # lines of a module
VAGUE = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
# Names that say nothing to whoever opens the folder for the first time, and what stands for them.
RIDDLES = {
    "aside": "background",
    "lookout": "controller_link",
    "link": "member_link",
    "witness": "peer_probe",
    "fence": "attempt",
    "wanted": "file_choice",
    "changes": "overrides",
    "facts": "model_facts",
    "levers": "precision",
    "bare": "meta_model",
    "twin": "scaled_down",
    "asked": "prompts",
    "misfits": "host_verdict",
    "life": "heartbeat",
    "gates": "learning_check",
    "saves": "mark_checkpoints",
    "census": "coverage",
    "forked": "forked_ranks",
    "whole_folder": "atomic_folder",
    "platform": "device",
    "compat": "import_fixes",
}
IN_GANGS = {
    "gang": "context",
    "host": "host_evidence",
    "failures": "classify",
    "restart": "next_step",
    "page": "prefect_page",
}
STAND_IN = "trainer/startup/cpu/stand_in"  # named as the library it stands in for names its modules


def modules(root: Path) -> list[Path]:
    """Relative to the root."""
    found = [path.relative_to(root) for folder in OWN for path in (root / folder).rglob("*.py")]
    return sorted(path for path in found if not path.as_posix().startswith(STAND_IN))


def imports(root: Path, path: Path) -> list[tuple[int, str]]:
    """Line and full name of all that a module imports."""
    return _imports((root / path).read_text(), path.parent.parts)


@functools.cache
def _imports(text: str, package: tuple[str, ...]) -> list[tuple[int, str]]:
    return [*_walk(text, package)]


def _walk(text: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = [*above, *filter(None, [node.module])]
            yield from ((node.lineno, ".".join([*source, alias.name])) for alias in node.names)


def trespasses(root: Path) -> list[str]:
    """Imports of a folder that may not be seen from there, or of a library that is too heavy for it."""
    found = []
    for path in modules(root):
        top = path.parts[0]
        closed = ({*OWN, "tests", "benchmarks"} - OWN[top]) | FOREIGN.get(top, set())
        for line, name in imports(root, path):
            package = name.partition(".")[0]
            if package in closed or (top == "contract" and package not in {"contract", *sys.stdlib_module_names}):
                found.append(f"{path}:{line} imports {name}")
    return found


def room(name: str) -> tuple[str, str]:
    """Folder and room of a module's dotted name."""
    folder, *rest = name.split(".")
    return folder, "commands" if folder == "trainer" and len(rest) < 2 else rest[0] if rest else ""


def graph(root: Path) -> dict[str, set[str]]:
    """Dotted names of the tree's modules, and those of the tree's modules that each imports."""
    files = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in modules(root)}
    names, found = set(files.values()), defaultdict(set)
    for path, name in files.items():
        for _, what in imports(root, path):
            target = what if what in names else what.rpartition(".")[0]
            if target in names and target != name:
                found[name].add(target)
    return found


def arrows_up(root: Path) -> list[str]:
    """Imports of a room that lies above, or beside, in the order of ROOMS."""
    levels = {(top, one): level for top, order in ROOMS.items() for level, line in enumerate(order) for one in line}
    found = []
    for name, targets in graph(root).items():
        for target in sorted(targets):
            here, there = room(name), room(target)
            if here[0] == there[0] and here != there and here in levels and levels.get(there, -1) <= levels[here]:
                found.append(f"{name} imports {target}")
    return sorted(found)


def unordered(root: Path) -> list[str]:
    """Rooms that ROOMS does not place."""
    there = {room(".".join(path.with_suffix("").parts)) for path in modules(root) if path.name != "__init__.py"}
    placed = {(folder, one) for folder, order in ROOMS.items() for line in order for one in line}
    return sorted(f"{folder}/{one}" for folder, one in there - placed if folder in ROOMS)


def circles(root: Path) -> list[list[str]]:
    """Groups of modules each of which imports itself by way of the others."""
    return groups_in_cycles(graph(root))


def folder_cycles(root: Path) -> list[list[str]]:
    """Groups of entries of one folder, modules or folders, that import one another in a cycle, at every depth.

    An import counts for the two entries in which the paths of the modules first differ.
    """
    siblings = defaultdict(set)
    for name, targets in graph(root).items():
        for target in targets:
            parts, others = name.split("."), target.split(".")
            same = next((i for i, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), None)
            if same is not None:  # else one of them is the __init__.py of a folder around the other
                siblings[".".join(parts[: same + 1])].add(".".join(others[: same + 1]))
    return groups_in_cycles(siblings)


def groups_in_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(edges.get(start, ()))
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += edges.get(name, ())
        return seen

    closure = {name: reached(name) for name in edges}
    turning = {name for name, names in closure.items() if name in names}
    groups = {frozenset(other for other in turning & closure[name] if name in closure[other]) for name in turning}
    return sorted(sorted(group) for group in groups)


def crowded(root: Path) -> list[str]:
    rooms: dict[Path, int] = defaultdict(int)
    for path in modules(root):
        rooms[path.parent] += path.name not in ("__init__.py", "__main__.py")
    return [f"{folder}: {count} modules" for folder, count in rooms.items() if count > MOST]


def long_ones(root: Path) -> list[str]:
    return [str(path) for path in modules(root) if len((root / path).read_text().splitlines()) > LONGEST]


def riddles(root: Path) -> list[str]:
    found = []
    for path in modules(root):
        known = RIDDLES | (IN_GANGS if path.is_relative_to("tasks/gang") else {})
        if path.stem in known:
            found.append(f"{path}: call it {known[path.stem]}")
        found += [f"{path}: {name} says nothing" for name in sorted(VAGUE & {*path.parts, path.stem})]
    return found


def test_imports_point_one_way():
    assert trespasses(ROOT) == []
    assert arrows_up(ROOT) == []


def test_every_room_has_its_place_in_the_order():
    assert unordered(ROOT) == []


def test_no_modules_import_one_another_in_a_circle():
    assert circles(ROOT) == []


def test_no_folders_import_one_another_in_a_cycle():
    assert folder_cycles(ROOT) == []


@pytest.mark.filterwarnings("default:large folder")
def test_large_folders_are_reported():
    """A warning in the output, not a limit: a limit would decide where a module goes."""
    for line in crowded(ROOT):
        warnings.warn(f"large folder: {line}", stacklevel=1)


def test_names_say_what_a_module_is_about():
    assert riddles(ROOT) == []


def test_a_module_has_one_subject():
    """Rarely more than 300 lines; above 500 there are two."""
    assert long_ones(ROOT) == []


@pytest.fixture
def plant(tmp_path):
    """plant(path, text) -> the root of a tree that has this module too."""

    def plant(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return plant


def test_trespassing_is_seen_in_every_form(plant):
    plant("contract/faults.py", "import os.path, yaml\nfrom contract import amounts\nfrom conf import load\n")
    root = plant(
        "tasks/stages/train.py",
        "import os, torch.nn\nfrom flows import plan\ndef f():\n    from ... import conf, trainer\n    import conf\n",
    )
    assert trespasses(root) == [
        "contract/faults.py:1 imports yaml",
        "contract/faults.py:3 imports conf.load",
        "tasks/stages/train.py:1 imports torch.nn",
        "tasks/stages/train.py:2 imports flows.plan",
        "tasks/stages/train.py:4 imports trainer",
    ]


def test_an_arrow_up_is_seen_wherever_it_stands(plant):
    plant("trainer/train.py", "from trainer.training import metrics\n")
    plant("trainer/training/metrics.py", "def f():\n    from trainer import train\n")
    plant("trainer/weights/merge.py", "from trainer.serving.engine import ask\n")
    plant("trainer/serving/engine.py")
    plant("tasks/run/session.py", "if TYPE_CHECKING:\n    from tasks.gang import board\n")
    root = plant("tasks/gang/board.py", "from tasks.run import session\n")
    assert arrows_up(root) == [
        "tasks.run.session imports tasks.gang.board",
        "trainer.training.metrics imports trainer.train",
        "trainer.weights.merge imports trainer.serving.engine",
    ]


def test_a_room_without_a_place_is_seen(plant):
    plant("tasks/attic/old.py")
    assert unordered(plant("tasks/run/session.py")) == ["tasks/attic"]


def test_a_circle_is_seen_wherever_it_stands(plant):
    plant("conf/load.py", "from conf import network\n")
    plant("conf/network.py", "def f():\n    from conf.overrides import typed\n")
    plant("conf/overrides.py", "if TYPE_CHECKING:\n    from conf.load import load\n")
    root = plant("conf/model_facts.py", "from conf import load\n")
    assert circles(root) == [["conf.load", "conf.network", "conf.overrides"]]


def test_a_crowd_is_seen(plant):
    for number in range(MOST):
        plant(f"trainer/data/m{number}.py")
    root = plant("trainer/data/__init__.py")
    assert crowded(root) == []
    assert crowded(plant("trainer/data/one_more.py")) == [f"trainer/data: {MOST + 1} modules"]


def test_large_folders_are_a_warning_and_no_failure(plant, monkeypatch):
    for number in range(MOST):
        plant(f"trainer/data/m{number}.py")
    root = plant("trainer/data/one_more.py")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", root)
    with pytest.warns(UserWarning, match=f"large folder: trainer/data: {MOST + 1} modules"):
        test_large_folders_are_reported()


def test_a_cycle_of_folders_is_seen_at_every_depth(plant):
    """No two modules of these import one another, and in the last no two folders do."""
    plant("tasks/run/session.py", "from tasks.store.local import open\n")
    plant("tasks/store/local.py")
    plant("tasks/store/s3.py", "def f():\n    from tasks.run import lease\n")
    plant("tasks/run/lease.py")
    plant("trainer/data/read/lines.py", "from ..tokens import chat\n")
    plant("trainer/data/tokens/chat.py")
    plant("trainer/data/tokens/plain.py", "from trainer.data import rows\n")
    root = plant("trainer/data/rows.py", "if TYPE_CHECKING:\n    from trainer.data.tokens.chat import Chat\n")
    assert circles(root) == []
    assert folder_cycles(root) == [["tasks.run", "tasks.store"], ["trainer.data.rows", "trainer.data.tokens"]]


@pytest.mark.parametrize(
    "name",
    ["conf/levers.py", "tasks/gang/page.py", "tasks/gang/diagnosis/host.py", "conf/utils.py", "trainer/core/x.py"],
)
def test_a_name_that_says_nothing_is_seen(plant, name):
    plant("tasks/pages/page.py")
    (line,) = riddles(plant(name))
    assert line.startswith(name)


def test_a_long_module_is_seen(plant):
    root = plant("conf/short.py", "\n" * LONGEST)
    assert long_ones(root) == []
    assert long_ones(plant("conf/long.py", "\n" * (LONGEST + 1))) == ["conf/long.py"]


def test_host_side_starts_without_the_trainer_s_libraries():
    """What is imported indirectly counts too; and importing does nothing else."""
    names = [
        ".".join(path.with_suffix("").parts)
        for path in modules(ROOT)
        if path.parts[0] != "trainer" and path.stem not in ("__init__", "__main__")
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
