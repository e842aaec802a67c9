"""benchmarks/packed_quality.py: bases are compared seed by seed, and rows of either question have the same facts."""

import json

from benchmarks import packed_quality


def test_a_base_is_compared_seed_by_seed():
    rows = [
        {"base": "bf16", "error": 0.0, "before": 1.0, "losses": [0.5, 0.7, 0.6]},
        {"base": "int4", "error": 0.097, "before": 1.2, "losses": [0.51, 0.71, 0.64], "served": [0.5, None, 0.6]},
    ]
    lines = packed_quality.table(rows)
    assert lines[2] == "| bf16 | 0.00 % | 1.0000 | 0.6000 ± 0.1000 |  |  |  |"
    assert lines[3] == "| int4 | 9.70 % | 1.2000 | 0.6200 ± 0.1015 | +3.33 % | +2.0 | 0.5500 ± 0.0707 |"


def test_one_seed_has_neither_a_deviation_nor_an_error():
    rows = [
        {"base": "bf16", "error": 0.0, "before": 1.0, "losses": [0.5]},
        {"base": "int4", "error": 0.097, "before": 1.2, "losses": [0.51]},
    ]
    lines = packed_quality.table(rows)
    assert lines[2] == "| bf16 | 0.00 % | 1.0000 | 0.5000 |  |  |  |"
    assert lines[3] == "| int4 | 9.70 % | 1.2000 | 0.5100 | +2.00 % |  |  |"


def test_both_questions_ask_for_the_team_and_the_order(tmp_path):
    for name, answer in (("first", "{1} {0}"), ("then", "{0} {1}")):
        packed_quality.write(tmp_path / name, 200, f"{name}:", answer)
    first, then = (
        [json.loads(line) for line in (tmp_path / name / "validation.jsonl").read_text().splitlines()]
        for name in ("first", "then")
    )
    assert len(first) == 200
    for one, other in zip(first, then, strict=True):
        assert one["input"].removesuffix("first:") == other["input"].removesuffix("then:")
        assert one["output"].split() == other["output"].split()[::-1]
        assert other["output"].split()[0] in one["input"]
