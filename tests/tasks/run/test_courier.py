"""Couriers: items arrive in order, a slow receiver delays no other, and a receiver that comes back gets the newest."""

import threading

from tasks.run.courier import Courier, closing
from tests.tasks.gang.conftest import wait_for


def test_lines_arrive_in_order_and_completely():
    lines: list[str] = []
    ticks: Courier[None] = Courier(lambda _: None, "ticks", most=1)
    with closing(20, sender := Courier(lines.append, "lines"), ticks):
        for number in range(1000):
            sender.take(str(number))
            ticks.take(None)
    assert lines == [str(number) for number in range(1000)]


def test_lines_do_not_wait_for_a_tick_that_hangs():
    lines: list[str] = []
    hangs, ticked = threading.Event(), threading.Event()

    def hang(_: None) -> None:
        ticked.set()
        hangs.wait(20)

    ticks: Courier[None] = Courier(hang, "ticks", most=1)
    with closing(3, sender := Courier(lines.append, "lines"), ticks):
        ticks.take(None)
        assert ticked.wait(5)
        sender.take("a line")
        wait_for(lambda: lines == ["a line"], 5)
        hangs.set()


def test_a_lost_line_does_not_stop_the_next():
    lines: list[str] = []

    def say(line: str) -> None:
        if line == "bad":
            raise ConnectionError
        lines.append(line)

    with closing(20, sender := Courier(say, "lines")):
        for line in ("first", "bad", "last"):
            sender.take(line)
    assert lines == ["first", "last"]


def test_a_receiver_that_comes_back_gets_the_newest():
    given: list[int] = []
    tried, back = threading.Event(), threading.Event()

    def give(number: int) -> None:
        tried.set()
        if not back.is_set():
            raise ConnectionError
        given.append(number)

    courier = Courier(give, "toy", most=1, again=0.05)
    for number in range(3):
        courier.take(number)
    assert tried.wait(10)
    back.set()
    wait_for(lambda: given)
    with closing(5, courier):
        pass
    assert given == [2]
