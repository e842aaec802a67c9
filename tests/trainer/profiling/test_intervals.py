"""trainer/profiling/intervals.py beside the same done moment by moment."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trainer.profiling import intervals

LAST = 40
SPANS = st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST)), max_size=8)


def moments(spans) -> set[int]:
    return {moment for start, end in spans for moment in range(start, end)}


@given(SPANS, SPANS)
def test_sets_of_moments_are_those_of_their_spans(one, other):
    first, second = intervals.union(one), intervals.union(other)
    assert moments(first) == moments(one)
    alone = intervals.without(first, second)
    assert moments(alone) == moments(one) - moments(other)
    for found in (first, alone):
        assert all(start < end for start, end in found)
        assert all(before[1] <= after[0] for before, after in pairwise(found))
        assert intervals.length(found) == len(moments(found))
