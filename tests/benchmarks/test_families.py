"""python -m benchmarks.families: every family beside transformers, PEFT and vLLM. All of them take half an hour."""

import json
import subprocess
import sys

import pytest

from benchmarks import families, layouts
from trainer.rehearsal import tiny_models


def test_every_family_is_tried_at_three_layouts():
    for kind in tiny_models.KINDS:
        assert len(families.cases(kind)) == 3, kind
    assert {case.model for case in layouts.TABLE} == {*tiny_models.KINDS}


def test_a_figure_that_is_missing_or_above_its_bound_is_missed():
    assert not families.missed("merged", 9e-5) and not families.missed("vLLM", "needs a GPU")
    assert families.missed("merged", 2e-4) and families.missed("vLLM", 2e-3)
    assert families.missed("adapter", float("nan")) and families.missed("layouts", float("inf"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_family(kind, tmp_path):
    command = [sys.executable, "-m", "benchmarks.families", kind, "--workdir", str(tmp_path / "work")]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["missed"] == []
