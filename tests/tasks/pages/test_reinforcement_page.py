"""tasks/pages/learning_pages.py: a reinforcement learning that is under way, for people."""

from tasks.pages import learning_pages
from tasks.tracking import plots


def lines_of(step: int, reward: float) -> list[dict]:
    """What two updates leave, which are one step."""
    found = {"kind": "reinforce", "step": 2 * step, "time": 100.0 + step, "reward": reward, "reward_best": 1.0}
    found |= {"groups_with_signal": 0.5, "mismatch": 1.5e-7, "entropy": 0.7, "length": 3.25, "length_max": 8}
    found |= {"gradient_signal": 2.04, "step_length": 0.52}
    found |= {"truncated": 0.125, "seconds_generate": 0.5, "seconds_train": 0.25}
    trained = [{"kind": "train", "step": number, "time": 100.0 + number} for number in (2 * step - 1, 2 * step)]
    return [*trained, found]


LINES = [line for step, reward in ((1, 0.25), (2, 0.75), (3, 0.5)) for line in lines_of(step, reward)]
SAMPLES = [{"step": 3, "prompt": "the pipe | leaks", "answer": "plumbing", "reference": "plumbing", "reward": 1.0}]


def test_the_line_of_a_reinforcement_learning():
    said = learning_pages.reinforcement_headline(LINES, 10, 2)
    assert said == "step 3 of 10, reward 0.500, mismatch 1.5e-07, length 3.2, 0:00:14 left"
    assert learning_pages.reinforcement_headline([], 10, 2) == ""


def test_the_page_of_a_reinforcement_learning():
    text = learning_pages.reinforcement("quick", LINES, SAMPLES, 10, 2, b"png", {"MLflow": "http://mlflow/#/a?b=c"})
    assert "**Step 3 of 10, 0:00:14 left**" in text
    assert "| reward | 0.500 | 0.250 at first, highest 0.750 at step 2 |" in text
    assert "| length | 3.2 tokens | longest 8, 12% cut off |" in text
    assert "| signal of gradients | 2.0 | deviations from noise; steps have 52% of their length |" in text
    assert "| seconds | 0.75 | generate 0.5, train 0.25 |" in text
    assert "| `the pipe ¦ leaks` | `plumbing` | `plumbing` | 1 |" in text
    assert "![rewards](data:image/png;base64,cG5n)" in text and "- [MLflow](<http://mlflow/#/a?b=c>)" in text


def test_answers_that_are_made_beside_training_are_no_part_of_a_steps_seconds():
    lines = [line | {"seconds_wait": 0.125, "seconds_reward": 0.1, "version_lag": 1.0} for line in LINES]
    text = learning_pages.reinforcement("quick", lines, SAMPLES, 10, 2, None, {})
    assert "| version lag | 1 | steps since the weights that generated the answers |" in text
    assert "| answers, during training | 0.6 | generate 0.5, reward 0.1 |" in text
    assert "| seconds | 0.375 | wait 0.12, train 0.25 |" in text


def test_one_picture_has_rewards_mismatch_and_length():
    assert (plots.together(LINES, plots.TOGETHER["reinforcement"]) or b"").startswith(b"\x89PNG")


def test_steps_are_whole_numbers_below_a_figure():
    """Twenty steps had marks at 2.5 and 7.5."""
    _, axes = plots.canvas("Reward", "step", "")
    plots.draw(axes, [{"kind": "reinforce", "step": n, "reward": n / 20} for n in range(1, 21)], "reward")
    assert all(place == int(place) for place in axes.get_xticks())
