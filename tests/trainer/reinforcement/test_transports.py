"""Ways of weights to vLLM: each gives it the same policy, and an end of one side is noticed by the other."""

import multiprocessing
import os
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.load import ConfigError, load
from contract import output_marks
from contract.faults import Fault
from tests.support.reinforced import ADAPTER, answers, of_steps
from trainer.reinforcement.engines import settings
from trainer.reinforcement.transfer import shared_memory, wire
from trainer.serving.hosts import free_port

SENT = torch.arange(5000).to(torch.uint8)


def other_side(port: int, ends_early: bool) -> None:
    pipe = wire.Pipe("127.0.0.1", port, 1)
    if ends_early:
        os._exit(1)
    pipe.send(pipe.receive(len(SENT)) + 1)


@pytest.mark.parametrize("ends_early", [False, True])
def test_what_goes_through_a_pipe_arrives_and_a_side_that_has_ended_is_noticed(ends_early):
    port = free_port("127.0.0.1")
    process = multiprocessing.get_context("fork").Process(target=other_side, args=(port, ends_early))
    process.start()
    pipe = wire.Pipe("127.0.0.1", port, 0)
    if ends_early:
        process.join()
        with pytest.raises(RuntimeError):
            pipe.send(SENT)
            pipe.receive(len(SENT))
    else:
        pipe.send(SENT)
        assert torch.equal(pipe.receive(len(SENT)), SENT + 1)
    process.join()


def worker(port: int, rank: int, ends_early: bool, found) -> None:
    pipe = wire.Pipe("127.0.0.1", port, rank, workers=2)
    if ends_early and rank == 2:
        os._exit(1)
    for _ in range(2):
        found.send(int(pipe.receive(len(SENT)).sum()))


@pytest.mark.parametrize("ends_early", [False, True])
def test_all_workers_behind_a_pipe_get_what_is_sent_once_and_one_that_has_ended_is_noticed(ends_early):
    port, context = free_port("127.0.0.1"), multiprocessing.get_context("fork")
    mine, theirs = multiprocessing.Pipe()
    workers = [context.Process(target=worker, args=(port, rank, ends_early, theirs)) for rank in (1, 2)]
    for one in workers:
        one.start()
    pipe = wire.Pipe("127.0.0.1", port, 0, workers=2, seconds=20.0)
    if ends_early:
        workers[1].join()
        with pytest.raises(RuntimeError):
            for _ in range(2):
                pipe.send(SENT)
    else:
        pipe.send(SENT)
        pipe.send(SENT + 1)
        sums = sorted(mine.recv() for _ in range(4))
        assert sums == sorted([int(SENT.sum()), int((SENT + 1).sum())] * 2)
    for one in workers:
        one.kill()
        one.join()


def takes_nothing(port: int) -> None:
    pipe = wire.Pipe("127.0.0.1", port, 1)
    time.sleep(60 * bool(pipe))


def test_a_side_that_takes_nothing_is_waited_for_so_many_seconds():
    port = free_port("127.0.0.1")
    process = multiprocessing.get_context("fork").Process(target=takes_nothing, args=(port,))
    process.start()
    pipe = wire.Pipe("127.0.0.1", port, 0, seconds=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        pipe.send(SENT)
    assert 0.9 < time.monotonic() - began < 20
    process.kill()
    process.join()


def test_nccl_which_waits_for_ever_is_ended_where_the_other_side_has():
    ended, asked = [], iter([False, False, True])
    pipe = object.__new__(wire.Pipe)
    pipe.device, pipe.gone = torch.device("cuda"), lambda: next(asked)
    pipe.group = SimpleNamespace(abort=lambda: ended.append(True))
    with pytest.raises(RuntimeError, match="the other process has ended"):
        pipe.finish(SimpleNamespace(is_completed=lambda: False))
    assert ended == [True]


def read(arguments: tuple, found) -> None:
    found.send(shared_memory.opened(arguments, wire.HOST).sum().item())


def test_another_process_sees_the_memory_of_a_host_and_it_is_gone_with_both():
    memory = shared_memory.allocate(len(SENT))
    memory.copy_(SENT)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read, args=(shared_memory.shared(memory), theirs))
    process.start()
    assert mine.recv() == SENT.sum().item()
    process.join()
    shared_memory.collect()
    assert torch.equal(memory, SENT)  # what is closed is still this process's
    assert not [one for one in Path("/proc/self/fd").iterdir() if "memfd:rollout" in os.path.realpath(one)]


def test_nccl_is_refused_where_there_are_no_gpus():
    with pytest.raises(ConfigError, match=r"reinforce.transport: nccl sends from GPU to GPU, but hardware.gpu is cpu"):
        load("tiny-rl", ["reinforce.transport=nccl"])
    with pytest.raises(ConfigError, match=r"reinforce.transport: nccl needs separate GPUs for vLLM"):
        load("tiny-rl", ["reinforce.transport=nccl", "hardware.gpu=h200"])
    run = load("tiny-rl", ["reinforce.transport=nccl", "hardware.gpu=h200", "reinforce.engine_gpus=1"])
    with pytest.raises(Fault, match=r"^reinforce.transport: nccl needs GPUs, and this host has none"):
        settings.transport(run)


COLUMNS = ("sent_mb", "seconds_transfer", "seconds_export", "seconds_generate", "generated_tokens_per_second")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_transport_gives_vllm_the_same_policy(forked, place, base, work):
    """Prints, of a dense model, what each takes: medians of the steps behind the first."""
    base("llama")
    keys = ADAPTER | {"paths.model": work / "llama", "paths.base": work / "llama-base", "reinforce.steps": 3}
    keys |= {"reinforce.prompts": 8, "reinforce.samples": 4, "reinforce.max_tokens": 16}
    print("\ntransport", *COLUMNS, sep="  ")
    for name in ("gloo", "ipc", "adapter", "nccl over gloo", "files"):
        of_nccl = name.startswith("nccl")
        transport = "gloo" if of_nccl else name
        if name != "gloo":  # rows that are prepared
            output_marks.take(place / name, output_marks.REINFORCEMENT)
            shutil.copytree(place / "gloo" / "data", place / name / "data")
        module = "tests.support.nccl_over_gloo" if of_nccl else "trainer.reinforce"
        process, folder = forked(name, keys | {"reinforce.transport": transport}, module)
        assert process.wait(600) == 0, (place / f"{name}.log").read_text()[-4000:]
        assert answers(folder) == answers(place / "gloo"), name
        steps = of_steps(folder)[1:]
        assert all(step["probe"] < 1e-5 for step in steps)
        medians = [statistics.median(step.get(column, 0.0) for step in steps) for column in COLUMNS]
        print(name, *(f"{median:.3g}" for median in medians), sep="  ", flush=True)
    assert of_steps(place / "adapter")[0]["sent_mb"] < of_steps(place / "gloo")[0]["sent_mb"] / 4
