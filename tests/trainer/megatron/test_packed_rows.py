"""A packed row is computed as if it was alone, in every family."""

import json

import pytest

from trainer.rehearsal.tiny_models import KINDS

PACKED = ("data.packed=true", "train.micro_batch=1", "model.mtp=false")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_computed_as_if_they_were_alone(kind, configure, ranks, tmp_path):
    result = ranks("packed_rows", configure(kind, *PACKED, f"paths.output={tmp_path}"))
    assert result.code == 0, result.output[-3000:]
    found = json.loads(result.output.splitlines()[-1])
    assert found["loss"] <= 1e-6
    assert found["logits"] <= 1e-5
    assert found["changed"] == []
