"""Perplexity of the held-out test is a number for every model, however little it knows."""

from types import SimpleNamespace

import pytest

from conf.load import load
from trainer.data.tokens.perplexity import perplexity
from trainer.serving import held_out

WORST = -1000.0  # log-probability of each token


@pytest.fixture
def run(tmp_path):
    return load("tiny", [f"paths.data={tmp_path}"])


class Served:
    """A model with the answers b and c, and the log-probabilities -3 of two tokens and -1 of two."""

    def __init__(self, *totals: float):
        self.tokens, self.totals = None, totals

    def generate_until(self, asked):
        assert [self.tokens[one.args[0]] for one in asked] == [[1], [2]]
        return ["b", "c"]

    def _loglikelihood_tokens(self, asked):
        assert [tokens for _, *tokens in asked] == [[[1], [3, 3]], [[2], [3]]]
        return [(total, False) for total in self.totals]


ROWS = [held_out.Row("p", " b", ("b",), [1], [3, 3]), held_out.Row("q", " b", ("b",), [2], [3])]


def test_of_answers(run):
    served = Served(-3.0, -1.5)
    found = held_out.ask(run, served, held_out.Test(ROWS, []))
    metrics = {name.removeprefix("held_out/"): value for name, value in found["metrics"].items()}
    assert metrics == {
        "exact_match": 0.5,
        "exact_match_stderr": pytest.approx(0.5),
        "log_likelihood": -1.5,
        "perplexity": perplexity(1.5),
    }
    assert found["rows"] == {"held_out": 2} and served.tokens is None
    assert found["scores"]["held_out/exact_match"] == [(1.0, 1.0), (0.0, 1.0)]
    assert found["scores"]["held_out/perplexity"] == [(-3.0, 2), (-1.5, 1)]
    assert [sample["correct"] for sample in found["samples"]["held_out"]] == [True, False]
    worst = held_out.ask(run, Served(2 * WORST, WORST), held_out.Test(ROWS, []))
    assert 1e300 < worst["metrics"]["held_out/perplexity"] < float("inf")


def test_each_token_counts_once_whichever_row_it_is_in():
    metrics, _ = held_out._likelihood([(-3.0, 1), (-1.0, 3)])
    assert metrics["held_out/log_likelihood"] == -1.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [("blue", True), (" blue\n", True), ("azure", True), ("blue green", False), ("Blue", False), ("", False)],
)
def test_an_answer_is_right_if_it_equals_an_accepted_one_but_for_spaces_around_it(answer, right):
    assert held_out.is_right(answer, ["blue ", "azure"]) is right


def test_of_texts(run, monkeypatch):
    monkeypatch.setattr(held_out, "windows", lambda run: [[1, 2, 3]])
    monkeypatch.setattr(held_out, "_samples", lambda *_: [])
    found = held_out.ask_texts(run, SimpleNamespace(read=lambda asked: [[WORST] * 2 for _ in asked]))
    assert found["metrics"]["held_out/log_likelihood"] == WORST
    assert 1e300 < found["metrics"]["held_out/perplexity"] < float("inf")
