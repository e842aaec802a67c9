"""trainer/serving/decoding.py on a model that is a function: an adapter that counts in prompts alone is found."""

import math

from trainer.serving import decoding

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [7], [1, 8, 2, 8]]


class Served:
    """A model whose log-probability of a token follows from those before it, other by `stale` when it writes."""

    def __init__(self, stale: float = 0.0):
        self.stale = stale

    def continue_prompts(self, requests, count):
        written = []
        for tokens in requests:
            whole = [*tokens]
            for _ in range(count):
                whole.append((3 * whole[-1] + len(whole)) % 11)
            said = [self._of(whole[:at], whole[at]) + self.stale for at in range(len(tokens), len(whole))]
            written.append((whole[len(tokens) :], said))
        return written

    def read(self, requests):
        return [[self._of(tokens[:at], tokens[at]) for at in range(1, len(tokens))] for tokens in requests]

    def _of(self, before, token):
        return -((sum(before) * 7 + token) % 13) / 5


def found(served: Served, bound: float = 0.05) -> dict:
    return decoding.compare(served, PROMPTS, decoding.write(served, PROMPTS), bound)


def test_a_model_that_writes_what_it_reads_passes():
    same = found(Served())
    assert same["ok"] and same["tokens"] == 8 * len(PROMPTS) and same["mean"] == same["max"] == 0
    assert decoding.summary(same) == "32 tokens as written and as read: 0 nats apart (bound 0.05)"


def test_what_counts_in_prompts_alone_is_found():
    assert not found(Served(stale=0.2))["ok"] and found(Served(stale=0.01))["ok"]


def test_single_tokens_that_rounding_sends_elsewhere_are_none():
    pairs = [(-1.0, -1.001)] * 60
    assert decoding.judge([*pairs, *[(-1.0, -2.5)] * 4], 0.05)["ok"]
    assert not decoding.judge([*pairs, *[(-1.0, -2.5)] * 12], 0.05)["ok"]
    assert decoding.judge(pairs, 0.05)["max"] < 0.01


def test_numbers_that_are_none_do_not_agree():
    assert not decoding.judge([(math.nan, -1.0)] * 8, 0.05)["ok"]
