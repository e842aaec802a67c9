"""docs/extending/family.md: a copy of the repository without Qwen3 gets it back with the files of the page, which also
work from outside the repository."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conf import families
from conf.load import load
from conf.model_facts import facts_from_hf
from conf.rules import conversion
from contract.faults import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extending/family.md"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """A copy of what planning and Megatron need, without the family."""
    root = tmp_path_factory.mktemp("scratch") / "finetune"
    for name in ("contract", "conf", "trainer"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "own"))
    for ending in ("py", "json"):
        (root / f"conf/families/qwen3.{ending}").unlink()
    return root


def of_page(kind: str = "python") -> str:
    (code,) = re.findall(rf" *```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return textwrap.dedent(code)


def write_both(place: Path) -> None:
    place.with_suffix(".py").write_text(of_page())
    place.with_suffix(".json").write_text(of_page("json"))


def rehearse(root: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "trainer.rehearse",
        "tiny",
        "model.source=tiny://qwen3",
        *overrides,
    ]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


def test_a_family_from_outside_is_planned_and_built_by_megatron(scratch, tmp_path):
    without = rehearse(scratch)
    assert without.returncode == 2 and "tiny://qwen3: unknown model; known are tiny://deepseek-v3, " in without.stderr
    write_both(tmp_path / "mine")
    done = rehearse(scratch, f"model.family={tmp_path / 'mine.py'}")
    assert done.returncode == 0, done.stderr
    assert "equal: 1 of 1 ranks built and counted" in done.stdout


def test_the_files_of_the_page_are_all_that_a_family_needs(scratch):
    write_both(scratch / "conf/families/qwen3")
    done = rehearse(scratch)
    assert done.returncode == 0, done.stderr


def test_a_family_of_an_installed_package_is_known_without_a_key(tmp_path, monkeypatch):
    text = of_page().replace('"qwen3"', '"mine"').replace("Qwen3ForCausalLM", "MineForCausalLM")
    write_both(tmp_path / "mine")
    (tmp_path / "mine.py").write_text(text)
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[finetune.families]\nmine = mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    families.every.cache_clear()
    try:
        config = families.tiny()["mine"]
        assert conversion.obstacles(config) == [] and facts_from_hf(config).qk_norm
    finally:
        families.every.cache_clear()


def test_the_digest_of_a_family_follows_its_torch_part_next_to_it(tmp_path):
    family, part = tmp_path / "with_part.py", tmp_path / "bridge.py"
    family.write_text(of_page().replace('"qwen3"', '"mine", megatron="bridge.py"'))
    part.write_text("VERSION = 1\n")
    before = families.digest(str(family))
    part.write_text("VERSION = 2\n")
    assert families.digest(str(family)) != before
    before = families.digest(str(family))
    tiny = tmp_path / "with_part-mtp.json"
    tiny.write_text(of_page("json"))
    assert families.digest(str(family)) != before
    part.unlink()
    tiny.unlink()
    alone = families.digest(str(family))
    assert alone == hashlib.sha256(family.read_bytes()).hexdigest()


def test_a_family_from_outside_may_hold_its_tiny_models_itself(tmp_path):
    family = tmp_path / "mine.py"
    family.write_text(of_page().replace('"qwen3"', '"mine", tiny={"wide": {"head_dim": 128}}'))
    try:
        families.add(str(family))
        assert families.tiny()["mine-wide"]["head_dim"] == 128
    finally:
        families.every.cache_clear()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FAMILY = 3\n", "FAMILY in it is not a conf.families.Family"),
        (of_page().replace('"qwen3"', '"mine", megatron="bridge.py"'), "megatron in it: "),
        (of_page().replace('"qwen3"', '"mine", megatron="no_package.part"'), "megatron in it: no_package.part: "),
        ("import nothing_of_this_name\n", "no family can be loaded from it: ModuleNotFoundError: No module named"),
        (None, "no family can be loaded from it: FileNotFoundError"),
    ],
)
def test_a_place_without_a_family_is_refused_in_one_line(tmp_path, text, problem):
    place = tmp_path / "other.py"
    if text is not None:
        place.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load("tiny", [f"model.family={place}"])
    assert f'model.family: "{place}": {problem}' in str(raised.value)
