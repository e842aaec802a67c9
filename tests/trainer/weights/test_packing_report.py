"""trainer/weights/quantised/report.py: a matrix counts once, whoever holds a part of it, and the worst is told."""

import json

import pytest
import torch

from trainer.weights.quantised import report


def test_copies_count_once_and_parts_count_together(tmp_path, capfd):
    given = torch.full((4, 8), 2.0)
    half = [report.row("a", (top, 0), [(given, given + 0.02 * (1 + top))], False) for top in (0, 4)]
    exact = report.row("b", (0, 0), [(given, given)], True)
    whole, *rows = report.summary("int4", [half[0], half[0], half[1], exact, exact], [100, 2_000_000])
    first, second = (0.02 / 2, 0.1 / 2)
    expected = ((first**2 + second**2) / 2) ** 0.5
    assert [row["tensor"] for row in rows] == ["a", "b"] and [row["numbers"] for row in rows] == [64, 32]
    assert rows[0]["error"] == pytest.approx(expected, rel=1e-4) and rows[1]["error"] == 0
    assert [row["as_released"] for row in rows] == [False, True]
    assert whole["error"] == pytest.approx(expected * (2 / 3) ** 0.5, rel=1e-4)
    assert report.line([whole, *rows]) == (
        "model.base int4: 2 matrices of 96 numbers in 2.0 MB on the fullest rank, 2.94 % from the base "
        "(most: a, 3.61 %); 1 as released; packed-base.jsonl has each"
    )
    report.write(tmp_path / "new", "int4", [exact], 7)
    assert [*map(json.loads, (tmp_path / "new" / report.NAME).read_text().splitlines())][1]["tensor"] == "b"
    assert "0.00 % from the base; 1 as released" in capfd.readouterr().out


def test_a_base_without_matrices_has_a_line_too():
    (whole,) = report.summary("fp8", [], [0])
    assert whole["error"] == 0 and "0 matrices" in report.line([whole])
