"""docs/extending/: Megatron trains with the objective and the metric whose code the pages show."""

import json
import math
import textwrap

import pytest
import yaml

from tasks.tracking.tail import METRICS
from tests.support.extending_pages import ROOT, blocks, package


def test_a_training_has_the_objective_and_the_metric_of_the_pages(base, configure, ranks, tmp_path):
    base("llama")
    package(tmp_path, "objective", "focal", "focal_loss")
    (of_step,), of_names = blocks("metric"), blocks("metric", "yaml")[0]
    text = (ROOT / "trainer/training/metrics.py").read_text()
    place = "        self.write(line)\n        self._say(line)\n"
    assert text.count(place) == 1
    text = text.replace(place, textwrap.indent(of_step, " " * 8) + place)
    request = {"folder": str(tmp_path), "objective": "focal", "metrics": text}
    output = tmp_path / "output"
    output.mkdir()
    (output / "request.json").write_text(json.dumps(request))
    done = ranks("train_extended", configure("llama", "train.steps=2", f"paths.output={output}"))
    assert done.code == 0, done.output[-3000:]
    lines = [line for line in done.metrics if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["bits_per_token"] == pytest.approx(line["lm_loss"] / math.log(2))
        assert 0 < line["probability"] < 1 and line["lm_loss"] > 0

    names = yaml.safe_load(of_names)
    assert names == {"names": {"bits_per_token": "loss/training_bits_per_token"}} and {*names} < {*METRICS}
