"""conf/schema/run.py: every key is documented, and the committed JSON schema is the models' own."""

import json

import pytest
from pydantic import ValidationError

from benchmarks import keys
from conf.load import FOLDER, load
from conf.schema import __main__ as table
from conf.schema import run as schema


def test_committed_json_schema_is_in_step():
    written = (FOLDER / "schema.json").read_text()
    assert written == table.json_schema(), "run: python -m conf.schema --json > conf/schema.json"


def test_the_page_has_the_tables_of_all_keys():
    page = (FOLDER.parent / "docs/reference/keys.md").read_text()
    assert page == keys.page(), "run: make schema"


def test_every_key_is_described_and_in_the_table():
    lines = list(table.table(160))
    for key in schema.dotted_keys():
        assert any(line.startswith(f"{key} ") for line in lines), key
    for kind in schema.sections().values():
        assert all(field.description for field in kind.model_fields.values())
    assert max(map(len, lines)) <= 160


def test_table_fits_no_narrow_terminal_and_still_prints():
    assert list(table.table(1))


def test_json_schema_closes_every_section():
    sections = json.loads(table.json_schema())["$defs"].values()
    assert all(section["additionalProperties"] is False for section in sections)


def test_runs_are_frozen_and_hashable():
    run = load("tiny")
    with pytest.raises(ValidationError):
        run.train.steps = 3
    assert hash(run) == hash(load(FOLDER / "tiny.yaml"))
