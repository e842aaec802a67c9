"""contract/checkpoints.py: which checkpoint is the best one, and which ones stay."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from contract import checkpoints

LOSSES = {2: 0.9, 4: 0.5, 6: 0.7, 8: 0.5, 10: None, 12: 0.1}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints with these validation losses; the file of the newest one is cut short."""
    for step, loss in LOSSES.items():
        place = checkpoints.step_folder(tmp_path, step)
        place.mkdir()
        (place / "weights").write_text("whole")
        checkpoints.mark(place, **({} if loss is None else {"validations": {"loss": loss}}))
    (checkpoints.step_folder(tmp_path, 12) / "weights").write_text("cut")
    return tmp_path


def test_the_best_is_the_oldest_complete_one_of_the_lowest_loss(folder):
    assert checkpoints.best(folder) == (4, 0.5)
    assert checkpoints.best(folder / "nowhere") is None


def test_the_newest_complete_ones_and_the_best_stay(folder):
    checkpoints.remove_older(folder, 2, best=4)
    assert checkpoints.complete_steps(folder) == [4, 8, 10]
    assert checkpoints.remove_incomplete(folder) == ["iter_0000012"]
    checkpoints.remove_older(folder, 1, best=None)
    assert checkpoints.complete_steps(folder) == [10]


def test_two_ranks_remove_an_incomplete_checkpoint_at_the_same_time(tmp_path):
    for number in range(20):
        step = tmp_path / f"iter_{number:07d}"
        step.mkdir()
        for rank in range(50):
            (step / f"__{rank}_0.distcp").write_text(str(number * rank))
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(checkpoints.remove_incomplete, tmp_path) for _ in range(2)]:
            one.result()
    assert not [*tmp_path.iterdir()]
