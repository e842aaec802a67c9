"""trainer/reference: another model is asked of each row once, by however many ranks, however often they are killed."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from contract.output_marks import JOURNAL
from trainer.data import references
from trainer.reference import parts


def answers(run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(run.paths.reference).glob("*.npy"))}


@pytest.fixture
def asked(compared, ranks):
    """asked(name, *overrides, die=None) -> what asking came to, its run, and rows that were asked of.

    `die` says of which signal a rank ends.
    """
    compared("llama", "of-one-process")

    def asked(name: str, *overrides: str, die: signal.Signals | None = None):
        run = compared("llama", name, *overrides, ask=False)
        output = Path(run.paths.output)
        output.mkdir(exist_ok=True)
        (output / "die").unlink(missing_ok=True)
        if die:
            (output / "die").write_text(f"3 {die.value}")
        result = ranks("killed_reference", run)
        lines = (output / "asked.txt").read_text().splitlines() if (output / "asked.txt").exists() else []
        return result, run, lines

    return asked


def test_killed_ranks_go_on_at_another_layout_and_ask_no_row_twice(compared, asked):
    alone = compared("llama", "of-one-process")
    result, run, begun = asked("of-two", "layout.gpus_per_node=2", die=signal.SIGKILL)
    assert result.code == -9
    kept = [path.name for path in (Path(run.paths.reference) / JOURNAL).glob("*.npz")]
    assert kept and len(begun) < 250
    result, run, more = asked("of-two", "layout.gpus_per_node=1", die=signal.SIGTERM)
    assert result.code == -15 and len(begun) < len(more) < 250, "it is ended at once"
    result, run, lines = asked("of-two", "layout.gpus_per_node=1")
    assert result.code == 0, result.output[-3000:]
    assert "reference: continues with " in result.output
    # what the ranks that died had in their hands was in no part yet
    twice = len(lines) - len({*lines})
    assert len({*lines}) == 320 and twice <= 2 * run.train.micro_batch
    assert answers(run) == answers(alone)
    assert not (Path(run.paths.reference) / JOURNAL).exists()
    told = (Path(run.paths.reference) / "progress.jsonl").read_text().splitlines()
    assert json.loads(told[-1])["done"] == json.loads(told[-1])["total"] == 320


def test_parts_of_other_rows_are_not_gone_on_with(tmp_path):
    parts.begin(tmp_path, {"rows": "these"})
    mine = parts.Parts(tmp_path, "training")
    mine.add(1, np.array([[1.0, 2.0]], np.float32))
    mine.write(last=True)
    parts.begin(tmp_path, {"rows": "these"})
    assert parts.missing(tmp_path, "training", 3).tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="2 rows of training have no score, the first is row 0"):
        parts.join(tmp_path, "training", 3, parts.names(tmp_path))
    parts.begin(tmp_path, {"rows": "others"})
    assert parts.missing(tmp_path, "training", 3).tolist() == [0, 1, 2]


def test_rows_of_unlike_length_are_joined_in_their_order(tmp_path):
    parts.begin(tmp_path, {})
    lengths, whole = [2, 0, 3, 1], np.arange(24, dtype=np.float32).reshape(6, 4)
    ends = np.cumsum(lengths)
    for rows in ([3, 0], [2, 1]):
        mine = parts.Parts(tmp_path, "training")
        for row in rows:
            part = whole[ends[row] - lengths[row] : ends[row]]
            mine.add(row, part, part.astype(np.int32))
        mine.write(last=True)
    parts.join(tmp_path, "training", 4, parts.names(tmp_path))
    found = references.read(tmp_path, "training")
    assert isinstance(found, references.Likeliest)
    assert (found.values == whole).all() and (found.ids == whole).all()
    assert found.starts.tolist() == [0, 2, 2, 5, 6]
