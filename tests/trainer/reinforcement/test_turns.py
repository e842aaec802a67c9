"""vLLM and the trainer have a GPU's memory in turn: what vLLM is told, and in which order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.reinforcement.rollouts import Rollouts


class Told(Rollouts):
    """The trainer's side, with a list of what vLLM is told in the place of vLLM."""

    def __init__(self, transport: str, sleeps: bool = True):
        self.transport, self.sleeps, self.asleep = transport, sleeps, set()
        self.told: list[Any] = []
        self.sender: Any = SimpleNamespace(send=self._sent)

    def each(self, name: str, **arguments: Any) -> dict:
        self.told.append((name, *arguments.values()))
        return {}

    def _sent(self, tensors: Any, version: int, export: Any) -> int:
        self.told.append("weights")
        return 0


@pytest.fixture(autouse=True)
def freed(monkeypatch):
    """How often the trainer has given back what it does not use."""
    times: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(None))
    return times


def test_vllm_wakes_for_weights_and_takes_its_cache_once_they_are_there(freed):
    vllm = Told("ipc")
    vllm.sleep()
    vllm.update(iter(()), 1)
    vllm.begin()
    assert vllm.told == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        "weights",
        ("wake_up", ["kv_cache"]),
        ("forget",),
    ]
    assert len(freed) == 2


def test_weights_that_are_not_sent_again_are_kept_while_it_sleeps():
    vllm = Told("adapter")
    vllm.sleep()
    vllm.wake()
    assert vllm.told == [("sleep", 1), ("wake_up", ["kv_cache", "weights"])]


def test_it_is_told_once():
    vllm = Told("gloo")
    vllm.update(iter(()), 0)
    vllm.begin()
    vllm.sleep()
    vllm.sleep()
    assert vllm.told == ["weights", ("forget",), ("sleep", 2)]


def test_without_a_gpu_it_stays_awake(freed):
    vllm = Told("gloo", sleeps=False)
    vllm.sleep()
    vllm.update(iter(()), 1)
    vllm.begin()
    assert vllm.told == ["weights", ("forget",)] and not freed
