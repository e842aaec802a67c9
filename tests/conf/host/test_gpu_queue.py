"""conf/host/gpu_queue.py: who is given which of the free GPUs."""

import pytest

from conf.host.gpu_queue import Wish, choose, given, in_order

HOST = tuple("abcdefgh")


def wish(number: int, count: int, gpus: tuple[str, ...] = HOST, flow: str = "", rank: int = 0) -> Wish:
    return Wish(f"w{number}", gpus, count, number, flow, rank)


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ("abcdefgh", 4, "abcd"),
        ("acdefgh", 2, "cd"),
        ("abdfgh", 2, "ab"),  # the shorter row: a long one stays whole
        ("bcfgh", 3, "fgh"),
        ("aceg", 3, "ace"),
        ("hgba", 2, "ab"),
        ("d", 1, "d"),
    ],
)
def test_neighbours_are_given_where_possible(free, count, expected):
    assert "".join(choose([*free], count, HOST)) == expected


def test_a_gpu_that_is_not_listed_is_nobody_s_neighbour():
    assert choose(["MIG-1", "MIG-2", "b"], 2, HOST) == ("b", "MIG-1")


def test_first_come_first_served_and_all_or_nothing():
    assert given([wish(2, 4), wish(1, 4)], HOST, HOST) == {1: (*"abcd",), 2: (*"efgh",)}
    assert given([wish(1, 2), wish(2, 3)], "abcd", HOST) == {1: ("a", "b")}


def test_a_wish_for_all_is_not_passed_by_later_ones():
    assert given([wish(1, 8), wish(2, 1)], "abcdefg", HOST) == {}
    assert given([wish(1, 2, ("a", "b")), wish(2, 1)], "bcd", HOST) == {2: ("c",)}, "of others it may have some"


def test_training_takes_the_place_of_the_evaluation_of_its_flow_and_the_other_way_round():
    wishes = [wish(1, 4, flow="x", rank=1), wish(2, 4, flow="y"), wish(3, 8, flow="x")]
    assert [one.number for one in in_order(wishes)] == [3, 2, 1]
    assert given(wishes, HOST, HOST) == {3: HOST}
    assert [one.number for one in in_order([wish(2, 1), wish(1, 1)])] == [1, 2], "without a flow each is by itself"
