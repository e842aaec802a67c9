"""Files that forges read: they parse, agree with pyproject.toml, and name pages that exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_one_version_with_a_date():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == (version, cited["date-released"]) and cited["version"] == version


@pytest.mark.parametrize("template", [file for file in TEMPLATES if file.stem != "config"], ids=lambda file: file.stem)
def test_an_issue_form_has_what_a_forge_requires(template):
    form = yaml.safe_load(template.read_text())
    assert form["name"] and form["description"]
    names = [part.get("id") for part in form["body"] if part["type"] != "markdown"]
    assert all(names) and len({*names}) == len(names)
    assert all(part["attributes"].get("label") for part in form["body"] if part["type"] != "markdown")


@pytest.mark.parametrize("file", ["SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md", *map(str, TEMPLATES)])
def test_pages_that_they_name_exist(file):
    named = re.findall(r"\bdocs/[\w./-]*\w", (ROOT / file).read_text())
    assert [page for page in named if not (ROOT / page).exists()] == []
