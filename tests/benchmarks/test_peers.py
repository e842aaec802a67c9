"""benchmarks/gpu/peers.py: the plain loop trains the adapters, and the table has a line for each result and failure."""

import importlib
from pathlib import Path

import pytest

from conf import families

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("peers")


def spec(kind, **changes):
    text = families.as_text(families.tiny()[kind])
    spec = {"config": text, "rank": 4, "alpha": 8, "length": 16, "micro_batch": 2, "rows": 4, "steps": 3}
    return spec | {"dtype": "float32", "recompute": True, "experts": False} | changes


@pytest.mark.parametrize("experts", [False, True])
def test_the_loop_trains_and_says_what_it_leaves_out(peers, experts):
    result = peers.loop(spec("qwen3-moe", experts=experts))
    assert result["losses"] == sorted(result["losses"], reverse=True) and len({*result["losses"]}) == 3
    assert result["ms"] == pytest.approx(result["all_seconds"][2] * 1e3) and result["micro_batch"] == 2
    assert ("no adapters of experts" in result["remark"]) is not experts


def test_adapters_are_on_every_linear_layer_that_peft_accepts(peers):
    model, remark = peers.adapted(spec("nemotron-h", experts=True), "meta")
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    has = {part: any(f".{part}." in name for name in names) for part in ("in_proj", "q_proj", "experts", "out_proj")}
    assert has == {"in_proj": True, "q_proj": True, "experts": True, "out_proj": False}
    assert "no adapters of out_proj" in remark and "mamba_chunk_scan_combined: torch" in remark


def test_what_does_not_fit_is_tried_with_less(peers, monkeypatch):
    import torch

    tried = []

    def measure(model, spec, micro, device):
        tried.append((micro, model.is_gradient_checkpointing))
        if len(tried) < fits:
            raise torch.OutOfMemoryError
        return {"ms": 1.0}

    monkeypatch.setattr(peers, "measure", measure)
    fits = 9
    assert "out of memory" in peers.loop(spec("llama", micro_batch=6, rows=6))["failed"]
    assert tried == [(6, True), (3, True), (1, True)]
    tried, fits = [], 3
    result = peers.loop(spec("llama", micro_batch=2, recompute=False))
    assert tried == [(2, False), (1, False), (1, True)]
    assert result["remark"] == "no Liger; micro batch 1; recomputed, unlike ours"


def test_each_row_has_its_sides_and_each_end_a_line(peers, tmp_path, monkeypatch):
    ends = iter([{"out_of_memory": {"rank": 0}, "ranks": []}, {"ms": 2000.0, "gb": 7.5}, {"failed": "took too long"}])
    commands = []
    monkeypatch.setattr(peers, "answer", lambda command, *_: commands.append(command) or next(ends))
    monkeypatch.setattr("sys.argv", ["peers.py", str(tmp_path), "--only", "tiny"])
    assert peers.main() == 0
    assert [command[1] for command in commands] == ["trainer.trial", "--loop", "--loop"]
    _, first, second = (tmp_path / "peers.txt").read_text().splitlines()
    assert first.split()[:7] == ["tiny", "-", "-", "-", "2000", "256", "7.5"] and "ours: out of memory" in first
    assert "theirs: took too long" in second


def test_every_row_has_both_sides(peers, tmp_path):
    for one in peers.ROWS:
        sides = [side for side, *_ in peers.sides(one, tmp_path)]
        assert sides[:2] == ["ours", "theirs"], one
