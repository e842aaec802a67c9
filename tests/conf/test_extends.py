"""extends: a configuration takes the keys of another one, its own keys replace them, and each fault is one line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf import load as conf_load
from conf.load import FOLDER, FOLDERS, load, main
from conf.schema import __main__ as table
from conf.strict_yaml import parse
from contract.faults import ConfigError

ROOT = FOLDER.parent
PINNED = dict[str, tuple[str, str]]()
for row in (ROOT / "tests/assets/deployments.tsv").read_text().splitlines()[1:]:
    name, *digests = row.split("\t")
    PINNED[name] = (digests[0], digests[1])
BASE = """\
name: base
model: {source: org/model}
data: {seq_length: 64}
train: {steps: 10, global_batch: 2}
optimizer: {lr: 1e-4, warmup_steps: 5}
checkpoint: {save_every: 5}
layout: {gpus_per_node: 2, tp: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    return tmp_path


def write(text: str, file: str = "run.yaml") -> str:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)
    return file


def lines(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(write(text), overrides)
    return str(error.value).splitlines()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: without_empty(inner) for key, inner in sorted(value.items())}
    return {key: inner for key, inner in kept.items() if inner != {}}


def test_deployments_keep_their_parameters_and_their_resolved_configurations():
    """Defaults are left out, so that a new key changes no digest."""
    found = {}
    for entry in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        conf = entry.get("parameters", {}).get("conf")
        keys = load(conf).model_dump(mode="json", exclude_defaults=True) if conf else None
        del entry["description"]
        found[entry["name"]] = (digest(entry), digest(without_empty(keys)) if keys else "-")
    assert found == PINNED and len(found) == 54


def test_own_keys_replace_inherited_ones_and_overrides_replace_both():
    file = write("name: run\nextends: base.yaml\ntrain: {global_batch: 4}\nmodel: {mtp: true}\n")
    run, base = load(file, ["optimizer.lr=2e-4"]), load("base.yaml")
    assert (run.name, run.train.global_batch, run.model.mtp, run.optimizer.lr) == ("run", 4, True, 2e-4)
    assert (run.model.source, run.train.steps, run.layout) == (base.model.source, 10, base.layout)
    assert run.paths.output == "runs/run/output"


def test_a_key_that_says_the_same_by_another_name_replaces_the_inherited_one():
    run = load(write("name: run\nextends: base.yaml\ntrain: {epochs: 2}\noptimizer: {warmup: 0.1}\n"))
    assert (run.train.steps, run.train.epochs, run.optimizer.warmup) == (None, 2, 0.1)


def test_a_path_is_relative_to_the_file_and_a_base_needs_no_name(folder):
    write(BASE.replace("name: base\n", ""), "shared/short.yaml")
    write("extends: shared/short.yaml\ntrain: {steps: 20}\n", "middle.yaml")
    assert load(write("name: run\nextends: ../middle.yaml\n", "mine/run.yaml")).train.steps == 20
    assert load(write(f"name: run\nextends: {folder}/middle.yaml\n", "mine/run.yaml")).train.steps == 20


def test_an_own_configuration_extends_the_one_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(conf_load, "FOLDERS", (tmp_path, *FOLDERS[1:]))
    write("name: tiny\nextends: tiny\ntrain: {steps: 7}\n", "tiny.yaml")
    write("name: tinier\nextends: tiny\n", "tinier.yaml")
    assert load("tiny").train.steps == load("tinier").train.steps == 7
    assert load("tinier").train.global_batch == 16


@pytest.mark.parametrize(
    "text, line",
    [
        ("extends: glm-47", "run.yaml:2: extends: glm-47: no such configuration: glm-47; did you mean glm47?"),
        ("extends: nope.yaml", "run.yaml:2: extends: nope.yaml: no such configuration: nope.yaml"),
        ("extends: 7", "run.yaml:2: extends: 7 is not a string: it names a configuration, or a file relative to"),
        ("extends: [base.yaml]", "run.yaml:2: extends: a list is not a string"),
        ("extends:", "run.yaml:2: extends: null is not a string"),
        ("extends: run.yaml", "run.yaml:2: extends: run.yaml: a cycle: run.yaml leads back to this file"),
        ("extends: ../{folder}/run.yaml", "a cycle: "),
        ("extends: base.yaml\ntrain: {stps: 1}", "run.yaml: train.stps: unknown key; did you mean train.steps?"),
        ("extends: base.yaml\ntrain:", "run.yaml: train: null is not a section of keys"),
    ],
)
def test_what_is_wrong_is_one_line(folder, text, line):
    [found] = lines(f"name: run\n{text.replace('{folder}', folder.name)}\n")
    assert line in found


def test_a_cycle_of_several_and_a_long_chain_are_refused():
    write("extends: run.yaml\n", "other.yaml")
    assert lines("name: run\nextends: other.yaml\n") == [
        "other.yaml:1: extends: run.yaml: a cycle: run.yaml leads back to this file"
    ]
    for number in range(1, 6):
        write(f"extends: {'base' if number == 1 else f'c{number - 1}'}.yaml\n", f"c{number}.yaml")
    [found] = lines("name: run\nextends: c5.yaml\n")
    assert found.startswith("c2.yaml:1: extends: c1.yaml: too deep: at most 5 files")
    assert load(write("name: run\nextends: c3.yaml\n")).train.steps == 10


def test_a_wrong_inherited_value_names_the_file_that_holds_it():
    write(BASE.replace("steps: 10", "steps: ten, seeed: 1"), "base.yaml")
    found = lines("name: run\nextends: base.yaml\noptimizer: {lr: 5}\n")
    assert sorted(line.partition(";")[0] for line in found) == [
        "base.yaml: train.seeed: unknown key",
        'base.yaml: train.steps: "ten" is not an integer',
        "run.yaml: optimizer.lr: 5 is too large: it must be at most 1",
    ]
    assert lines("name: run\nextends: base.yaml\ntrain: {steps: 3}\n") == [
        "base.yaml: train.seeed: unknown key; did you mean train.seed?"
    ]


def test_a_file_that_extends_needs_its_own_name_and_extends_is_no_override(capsys):
    assert lines("extends: base.yaml\n") == ["run.yaml: name: required, and missing"]
    assert main([write("name: run\nextends: base.yaml\n"), "extends=tiny"]) == 2
    assert "extends: unknown key" in capsys.readouterr().err


def test_the_editors_schema_asks_for_a_name_alone_if_a_file_extends_another():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(table.json_schema()))
    tiny, _ = parse((FOLDER / "tiny.yaml").read_text(), "tiny.yaml")
    right = {"name": "run", "extends": "glm47", "train": {"steps": 7}}
    assert validator.is_valid(right) and validator.is_valid(tiny)
    without = {key: value for key, value in right.items() if key != "extends"}
    for wrong in (without, right | {"extends": 7}, {"extends": "glm47"}, right | {"train": {"stps": 7}}):
        assert not validator.is_valid(wrong)
