"""Lines of metrics.jsonl that a training goes on behind: those of earlier steps stay, and damage is left out."""

import pytest

from trainer.training.metrics_files import drop_after

KEPT = '{"kind": "train", "step": 2, "skipped_steps": 1}\n'
LATER = '{"kind": "train", "step": 3}\n'
DAMAGES = {
    "half a line": b'{"kind": "train", "st',
    "a number": b"7\n",
    "a list": b"[]\n",
    "nothing": b"null\n",
    "no step": b'{"kind": "train"}\n',
    "a step that is none": b'{"kind": "train", "step": "2"}\n',
    "no step at all": b'{"kind": "train", "step": null}\n',
    "no text": b"\xff\xfe\n",
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_last", [False, True])
def test_damage_is_left_out_and_the_rest_stays(tmp_path, damage, is_last):
    path = tmp_path / "metrics.jsonl"
    lines = [DAMAGES[damage].rstrip(b"\n") + b"\n", KEPT.encode(), LATER.encode()]
    path.write_bytes(b"".join(lines[1:]) + DAMAGES[damage] if is_last else b"".join(lines))
    assert drop_after(path, 2) == {"kind": "train", "step": 2, "skipped_steps": 1}
    assert path.read_text() == KEPT
