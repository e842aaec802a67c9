import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.read import likeness
from trainer.data.read.likeness import agree, bands, first_equal, signatures


def signed(*rows: list[int]) -> np.ndarray:
    return signatures(np.concatenate([np.array(row, np.int32) for row in rows]), np.array([len(row) for row in rows]))


def test_a_row_has_the_same_signature_whatever_stands_beside_it():
    random = np.random.Generator(np.random.PCG64(0))
    rows = [random.integers(0, 30_000, size).tolist() for size in (1, 2, 4, 5, 6, 300)]
    alone = np.concatenate([signed(row) for row in rows])
    assert (signed(*rows) == alone).all()
    assert (signed(*rows[::-1]) == alone[::-1]).all()
    assert signatures(np.empty(0, np.int32), np.empty(0, np.int32)).shape == (0, likeness.HASHES)


def test_rows_are_alike_as_far_as_they_share_sequences():
    """Of 200 pairs each: one word of a hundred changed, and a third of them."""
    random = np.random.Generator(np.random.PCG64(1))
    found = {}
    for changed in (1, 33):
        rows = [random.integers(0, 30_000, 100) for _ in range(200)]
        others = [row.copy() for row in rows]
        for other in others:
            other[random.choice(100, changed, replace=False)] += 1
        left, right = signed(*rows), signed(*others)
        same_band = np.any([a == b for a, b in zip(bands(left), bands(right), strict=True)], axis=0)
        found[changed] = (same_band & agree(left, right)).mean()
    assert found[1] > 0.9
    assert found[33] == 0


@given(st.lists(st.integers(0, 5), max_size=40))
def test_first_equal(keys):
    assert first_equal(np.array(keys, np.uint64)).tolist() == [keys.index(key) for key in keys]
