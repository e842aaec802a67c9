"""Behind the checks: a model that passes them although its files were damaged is converted, or refused in a line."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from conf.load import load
from contract.faults import Fault
from tests.support import small_model
from tests.support.damage import Set
from tests.support.drawn_damage import CONFIG, SETTINGS, SHARD, SPECIAL, TOKENIZER, YAML, in_json
from trainer.checks import inputs

MODEL = st.one_of(in_json(CONFIG), in_json(CONFIG), *map(in_json, (SETTINGS, SHARD, SPECIAL, TOKENIZER)))
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(st.lists(MODEL, max_size=2))
@example([])
@example([Set(CONFIG, ("to_dict",), None)])
@example([Set(CONFIG, ("id2label",), {"a": "b"})])
@example([Set(CONFIG, ("layer_types",), "x")])
@pytest.mark.timeout(3600, method="thread")
def test_what_passes_the_checks_is_converted_or_refused_without_a_stack_trace(ranks, tmp_path, damage):
    folder = tmp_path / "world"
    shutil.rmtree(folder, ignore_errors=True)
    small_model.write(folder / "model")
    for one in damage:
        one.apply(folder)
    (folder / "run.yaml").write_text(json.dumps(YAML))
    names = ("model", "base", "data", "output", "logs")
    run = load(folder / "run.yaml", [f"paths.{name}={folder / name}" for name in names])
    try:
        inputs.check_convert(run)
    except Fault:
        assume(False)
    result = ranks("convert", run)
    assert result.code in (0, 2) and "Traceback" not in result.output, result.output[-2000:]
    assert (result.code == 0) == (Path(run.paths.base) / "complete.json").exists()
    assert damage or result.code == 0, result.output
