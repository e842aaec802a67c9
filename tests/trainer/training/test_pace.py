"""trainer/training/pace.py: the time that is left."""

from trainer.training.pace import Pace


def test_the_first_step_which_compiles_is_no_measure_of_those_to_come():
    pace = Pace()
    assert pace.left(1, 100, now=90.0) == ""  # 90 s: 2.5 hours, if all were as slow
    assert pace.left(2, 100, now=92.0) == "  left 0:03:16"
    assert pace.left(12, 100, now=134.0) == "  left 0:05:52"  # with a validation of 22 s among them
    assert pace.left(100, 100, now=300.0) == "  left 0:00:00"


def test_a_resumed_training_counts_from_where_it_went_on_and_days_are_hours():
    pace = Pace()
    assert pace.left(501, 10_000, now=60.0) == ""
    assert pace.left(502, 10_000, now=70.0) == "  left 26:23:00"
