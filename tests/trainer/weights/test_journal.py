"""Units of a journal: the order of the calls, and what a later attempt does again."""

import pytest

from trainer.weights import journal


@pytest.mark.parametrize("distance", [1, 2, 9])
def test_units_are_announced_at_a_distance(distance, tmp_path):
    announced, made = list[int](), list[tuple[int, int]]()  # number, and how many were announced before

    def make(number: int) -> journal.Entry:
        made.append((number, len(announced)))
        return {"number": number}

    def do() -> dict[int, journal.Entry]:
        sizes = dict.fromkeys(range(5), 1)
        return journal.do(tmp_path, sizes, lambda number, _: number != 3, make, announced.append, distance)

    assert do() == {number: {"number": number} for number in range(5)}
    assert announced == [*range(5)]
    assert made == [(number, min(5, number + distance + 1)) for number in range(5)]
    do()  # unit 3 alone is not valid any more
    assert made[5:] == [(3, 6)]
