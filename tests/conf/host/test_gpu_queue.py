"""conf/host/gpu_queue.py: who is given which of the free GPUs."""

import pytest

from conf.host.gpu_queue import Request, assigned, choose, in_order

HOST = tuple("abcdefgh")


def request(number: int, count: int, gpus: tuple[str, ...] = HOST, flow: str = "", rank: int = 0) -> Request:
    return Request(f"w{number}", gpus, count, number, flow, rank)


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
    assert assigned([request(2, 4), request(1, 4)], HOST, HOST) == {1: (*"abcd",), 2: (*"efgh",)}
    assert assigned([request(1, 2), request(2, 3)], "abcd", HOST) == {1: ("a", "b")}


def test_a_request_for_all_is_not_passed_by_later_ones():
    assert assigned([request(1, 8), request(2, 1)], "abcdefg", HOST) == {}
    assert assigned([request(1, 2, ("a", "b")), request(2, 1)], "bcd", HOST) == {2: ("c",)}, "it may have other GPUs"


def test_training_takes_the_place_of_the_evaluation_of_its_flow_and_the_other_way_round():
    requests = [request(1, 4, flow="x", rank=1), request(2, 4, flow="y"), request(3, 8, flow="x")]
    assert [each.number for each in in_order(requests)] == [3, 2, 1]
    assert assigned(requests, HOST, HOST) == {3: HOST}
    assert [each.number for each in in_order([request(2, 1), request(1, 1)])] == [1, 2], "no flow: by arrival"
