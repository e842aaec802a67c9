"""Weights that went over wrongly are found by the probe in the step where it happens, and said by their fault.

PLANTED=20 plants each fault so many times.
"""

import json
import os

import pytest

PLANTED = int(os.environ.get("PLANTED", "3"))
SAID = {
    "no sync": "probe: vLLM has weights of version",
    "an old version": "vLLM still computes with the previous version",
    "one tensor left out": "came before, but not with version",
    "prefix cache not reset": "its prefix cache is of an older version",
    "another template": "probe: vLLM has read another prompt than the template makes of a row",
    "a flipped byte": "is not what was sent: digest",
}


@pytest.mark.slow
@pytest.mark.timeout(600 + 300 * PLANTED)
def test_each_fault_is_found_where_it_happens_and_is_told_from_the_others(finish):
    keys = {"reinforce.steps": PLANTED + 1, "checkpoint.save_every": PLANTED + 1}
    folder = finish("planted", keys, "tests.support.planted_faults")
    lines = [json.loads(line) for line in (folder / "planted.jsonl").read_text().splitlines()]
    found = {name: [line["told"] for line in lines if line["fault"] == name] for name in SAID}
    for name, told in found.items():
        assert len(told) >= PLANTED
        assert all(one and SAID[name] in one and "\n" not in one for one in told), (name, told)
