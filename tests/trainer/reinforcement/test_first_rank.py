"""Ranks hear from the first what it did, and keep no GPU busy while they wait: vLLM may have its turn there."""

import pytest

from contract.faults import Fault
from trainer.reinforcement import first_rank


@pytest.fixture
def others(monkeypatch) -> list:
    """Groups over which a second rank hears: twice of answers, and then of a fault."""
    heard: list = []

    def broadcast(outcome: list, src: int, group: object) -> None:
        heard.append((src, group))
        outcome[0] = (len(heard) < 3, "answers")

    monkeypatch.setattr(first_rank.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(first_rank.distributed, "new_group", lambda backend, timeout: (backend, timeout))
    monkeypatch.setattr(first_rank.distributed, "broadcast_object_list", broadcast)
    return heard


def test_another_rank_hears_over_the_host_and_ends_with_the_first_one_s_fault(others):
    on_first = first_rank.FirstRank()
    assert [on_first(list), on_first(list)] == ["answers", "answers"]
    with pytest.raises(Fault, match="answers"):
        on_first(list)
    assert others == [(0, ("gloo", first_rank.LONGEST))] * 3
