"""Part of the host that each engine has: GPUs behind those of training, or a share of the cores."""

import os

import pytest
import torch

from conf.load import load
from contract.faults import Fault
from trainer.reinforcement.engines import settings
from trainer.startup import device


def of(name: str, *overrides: str):
    return load(name, [*overrides] if name == "tiny-rl" else ["reinforce.steps=10", *overrides])


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, visible): this host has so many GPUs, of which some can be used."""

    def gpus(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(device, "has_gpu", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return gpus


def seen(run) -> list[dict[str, str]]:
    return [settings.environment(run, number) for number in range(run.reinforce.engines)]


def test_engines_get_the_gpus_behind_those_of_training(gpus):
    run = of("qwen3-30b-a3b-1xh200", "reinforce.engines=2", "reinforce.engine_gpus=1")
    gpus(4)
    assert seen(run) == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    gpus(3, "5,2,GPU-7")
    assert seen(run) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}]
    assert settings.transport(run) == "nccl"
    settings.require_room(run)


def test_a_host_with_too_few_of_them_says_so(gpus):
    gpus(2)
    with pytest.raises(Fault, match=r"^reinforce\.engine_gpus: 2 x 1 GPUs and the 1 of training are 3, but 2 can be"):
        seen(of("qwen3-30b-a3b-1xh200", "reinforce.engines=2", "reinforce.engine_gpus=1"))


def test_an_engine_on_several_gpus_has_them_of_training_or_behind_it(gpus):
    keys = ("reinforce.engines=2", "reinforce.engine_gpus=2")
    gpus(8)
    run = of("qwen3-30b-a3b-full-8xh200", *keys, "reinforce.in_turn=true")
    assert seen(run) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert settings.transport(run) == "ipc"
    gpus(5, "7,3,4,1,0")
    assert seen(of("qwen3-30b-a3b-1xh200", *keys)) == [{"CUDA_VISIBLE_DEVICES": "3,4"}, {"CUDA_VISIBLE_DEVICES": "1,0"}]


def test_gpus_that_cannot_read_those_of_training_are_told_of(gpus, monkeypatch):
    gpus(8)
    run = of("qwen3-30b-a3b-full-8xh200", "reinforce.engine_gpus=4", "reinforce.in_turn=true")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    settings.require_reach(run)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < 3)
    with pytest.raises(
        Fault, match=r"^reinforce.transport: ipc, but GPU 3 of this host cannot read the memory of the first"
    ):
        settings.require_reach(run)
    settings.require_reach(of("qwen3-30b-a3b-full-8xh200", "reinforce.engine_gpus=4"))


def test_on_the_first_gpu_of_training_an_engine_is_as_it_was(gpus):
    run = of("qwen3-30b-a3b-1xh200")
    gpus(1)
    assert seen(run) == [{}] and settings.transport(run) == "ipc"


def test_a_configuration_for_a_cpu_is_refused_on_a_gpu_that_both_would_want_at_once(gpus):
    gpus(1)
    with pytest.raises(
        Fault, match=r"^reinforce\.staleness: 1, but vLLM and Megatron use this host's first GPU in turn"
    ):
        settings.require_room(of("tiny-rl", "reinforce.staleness=1"))
    with pytest.raises(Fault, match=r"^reinforce\.engines: 2, but"):
        settings.require_room(of("tiny-rl", "reinforce.engines=2"))
    gpus(0)
    settings.require_room(of("tiny-rl", "reinforce.staleness=1", "reinforce.engines=2"))


def test_on_a_cpu_each_engine_has_a_core(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    settings.require_room(of("tiny-rl", "reinforce.engines=2"))
    with pytest.raises(
        Fault, match=r"^reinforce\.engines: 100 processes of vLLM, but this host has 2 cores; 2 at most$"
    ):
        settings.require_room(of("tiny-rl", "reinforce.engines=100"))
    settings.require_room(of("tiny-rl", "reinforce.engine_gpus=2"))
    for keys in (["reinforce.engine_gpus=4"], ["reinforce.engine_gpus=2", "reinforce.engines=2"]):
        with pytest.raises(Fault, match=r"^reinforce\.engine_gpus: \d x \d processes of vLLM, but this host"):
            settings.require_room(of("tiny-rl", *keys))


def test_on_a_cpu_engines_share_the_cores(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert seen(of("tiny-rl")) == [{}]
    assert seen(of("tiny-rl", "reinforce.engines=3")) == [{"OMP_NUM_THREADS": "2"}] * 3
