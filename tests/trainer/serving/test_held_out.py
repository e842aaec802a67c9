"""Perplexity of the held-out test is a number for every model, however little it knows."""

from types import SimpleNamespace

import pytest

from conf.load import load
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import held_out, held_out_texts

WORST = -1000.0  # log-probability of each token


@pytest.fixture
def run(tmp_path):
    return load("tiny", [f"paths.data={tmp_path}"])


def test_of_answers(run):
    _, likelihoods = held_out.tasks(run, held_out.Test([], []))
    (found,) = [one["aggregation"] for one in likelihoods["metric_list"] if one["metric"] == "perplexity"]
    assert found([(-3.0, 2), (-1.0, 2)]) == perplexity(1.0) == pytest.approx(2.7182818)
    assert 1e300 < found([(2 * WORST, 2)]) < float("inf")


def test_each_token_counts_once_whichever_row_it_is_in(run):
    _, likelihoods = held_out.tasks(run, held_out.Test([], []))
    (found,) = [one["aggregation"] for one in likelihoods["metric_list"] if one["metric"] == "log_likelihood"]
    assert found([(-3.0, 1), (-1.0, 3)]) == -1.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [("blue", True), (" blue\n", True), ("azure", True), ("blue green", False), ("Blue", False), ("", False)],
)
def test_an_answer_is_right_if_it_equals_an_accepted_one_but_for_spaces_around_it(answer, right):
    assert held_out.is_right(answer, ["blue ", "azure"]) is right


def test_of_texts(run, monkeypatch):
    monkeypatch.setattr(held_out_texts, "windows", lambda run: [[1, 2, 3]])
    monkeypatch.setattr(held_out_texts, "_samples", lambda *_: [])
    found = held_out_texts.ask(run, SimpleNamespace(read=lambda asked: [[WORST] * 2 for _ in asked]))
    assert found["metrics"]["held_out/log_likelihood"] == WORST
    assert 1e300 < found["metrics"]["held_out/perplexity"] < float("inf")
