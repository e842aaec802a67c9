"""tasks/run/progress.py: what a bar says."""

from types import SimpleNamespace

from tasks.run import progress


def test_a_bar_of_steps_does_not_count_what_comes_before_the_end_of_the_first_one(monkeypatch):
    told, now = [], [0.0]
    bar = progress.Progress("train", "steps")
    bar.artifact = SimpleNamespace(has_task=True, is_sent=False, send=lambda percent, text: told.append(text))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for moment, step in ((0, 10), (60, 10), (120, 11), (122, 12), (130, 16)):
        now[0] = moment
        bar.update(step, 110)
    assert told == [
        "10 of 110 steps",
        "11 of 110 steps",
        "12 of 110 steps, 0:03:16 left",
        "16 of 110 steps, 0:03:08 left",
    ]


def test_the_end_of_a_bar_is_sent_once(monkeypatch):
    told, now = [], [0.0]
    bar = progress.Progress("evaluate-base", "rows")
    bar.artifact = SimpleNamespace(has_task=True, is_sent=True, send=lambda percent, text: told.append(text))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for moment, row in ((0, 0), (4, 40), (4.5, 49), (5, 49), (5.5, 49)):
        now[0] = moment
        bar.update(row, 49)
    assert told == ["40 of 49 rows", "49 of 49 rows"]
