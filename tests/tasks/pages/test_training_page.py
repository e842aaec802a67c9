"""tasks/pages/learning_pages.py and tasks/tracking/plots.py: a training that is under way, for people."""

from tasks.pages import learning_pages
from tasks.tracking import plots


def line(step: int, at: float, **more) -> dict:
    found = {"kind": "train", "step": step, "time": at, "lm_loss": 4 / step, "lr": 1e-4, "grad_norm": 1.0}
    return found | {"tokens_per_second": 1500.0, "step_seconds": 0.5, "memory_gb": 1.2} | more


LINES = [line(1, 100.0), line(2, 200.0), *(line(step, 200.0 + step) for step in range(3, 31))]
VALIDATED = {"kind": "validation", "step": 25, "time": 226.0, "lm_loss": 0.3}


def test_a_slow_first_step_does_not_count_in_what_is_left():
    assert learning_pages.seconds_left(LINES, 50) == 20
    assert learning_pages.seconds_left(LINES[:1], 50) is None
    assert learning_pages.seconds_left([*LINES, line(50, 300.0)], 50) == 0
    resumed = [*LINES, {"kind": "start", "step": 30, "time": 9000.0}, line(31, 9001.0), line(32, 9003.0)]
    assert learning_pages.seconds_left(resumed, 50) == 36, "the hours in between do not count"


def test_the_line_of_a_training():
    said = learning_pages.training_headline([*LINES, VALIDATED], 50)
    assert said == "step 30 of 50, loss 0.1333, validation 0.3, 1,500 tokens/s, 0:00:20 left"
    assert learning_pages.training_headline([], 50) == ""


def test_the_page_of_a_training():
    text = learning_pages.training("quick", [*LINES, VALIDATED], 50, b"png", {"MLflow": "http://mlflow/#/a?b=c"})
    assert (
        "**Step 30 of 50, 0:00:20 left**" in text and "| validation | 0.3 | at step 25; lowest 0.3 at step 25 |" in text
    )
    assert "![training](data:image/png;base64,cG5n)" in text and "- [MLflow](<http://mlflow/#/a?b=c>)" in text


def test_the_page_names_padding_where_there_is_some():
    padded = line(31, 231.0, padding=0.46)
    assert "| padding | 46% | of the positions have no token" in learning_pages.training(
        "quick", [*LINES, padded], 50, None, {}
    )
    assert "padding" not in learning_pages.training("quick", LINES, 50, None, {})


def test_the_page_shows_where_the_time_goes():
    spent = "75.0% effective: training 75.0%, lost 25.0%"
    text = learning_pages.training("quick", LINES, 50, None, {}, spent)
    assert "| time | 75.0% effective | training 75.0%, lost 25.0% |" in text


def test_one_picture_has_all_curves():
    assert (plots.together([*LINES, VALIDATED], plots.TOGETHER["training"]) or b"").startswith(b"\x89PNG")
    assert plots.together([VALIDATED], plots.TOGETHER["reinforcement"]) is None
