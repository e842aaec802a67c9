"""No test draws an element anew from the same seed: its data would be many copies of one value."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
