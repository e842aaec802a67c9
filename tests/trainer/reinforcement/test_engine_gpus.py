"""An engine cut over several GPUs, which are processes on a CPU: the answers of one, and one end for all of them."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract import output_marks
from contract.faults import Fault
from tests.support.reinforced import answers, norms
from trainer.reinforcement.vllm_process import Rollout

STEPS = 3
KEYS = {"hardware.gpu": "cpu", "reinforce.steps": STEPS, "checkpoint.save_every": STEPS}
TWO = {"reinforce.engine_gpus": 2}
REPLAYED = {"reinforce.replay_experts": True}
ADAPTER = {"adapter.kind": "lora", "adapter.rank": 8, "adapter.targets": "[linear_qkv,linear_proj]"}
MEMORY = Path("/dev/shm")


class Workers:
    """What vLLM's workers say, in their order."""

    def __init__(self, *said: Any):
        self.said = said

    def collective_rpc(self, method: str, args: tuple) -> list[Any]:
        assert method == "answer_or_fault"
        if args[0] == "weight_transfer_engine.cannot_repeat":
            return [("", None), ("it packs its weights", None)]
        return [(None, str(one)) if isinstance(one, Fault) else (one, None) for one in self.said]

    def finish_weight_update(self) -> None:
        pass


def rollout(*said: Any) -> Rollout:
    found = object.__new__(Rollout)
    found.llm, found.arrived, found.names, found.version = Workers(*said), {"a", "b", "c"}, set(), -1
    found.sleeps = False
    return found


def test_a_version_counts_once_every_worker_has_had_all_tensors():
    whole = rollout({"a", "b", "c"}, {"a", "b", "c"})
    assert whole.finish(3) == "it packs its weights"  # which one of them does
    assert whole.version == 3
    with pytest.raises(Fault, match=r"^transfer of weights: b and 1 more did not reach worker 1 of vLLM$"):
        rollout({"a", "b", "c"}, {"a"}).finish(3)


def test_a_fault_that_one_worker_finds_is_one_of_the_run_and_says_which_worker():
    fault = Fault("transfer of weights: a is not what was sent")
    with pytest.raises(Fault, match=r"^transfer of weights: a is not what was sent \(worker 1\)$"):
        rollout(None, fault).bucket([], 0, None)
    with pytest.raises(Fault, match=r"^transfer of weights: a is not what was sent$"):
        rollout(fault).bucket([], 0, None)


@pytest.fixture(scope="module")
def alone() -> dict[str, Path]:
    return {}


@pytest.fixture
def learned(forked, place, alone, work, base):
    """learned(name, keys) -> the folder of a learning; rows are prepared once for each model."""

    def learned(name: str, keys: dict[str, object], module: str = "trainer.reinforce") -> Path:
        kind = str(keys.get("model", "glm4-moe"))
        given = {key: value for key, value in keys.items() if key != "model"}
        if kind != "glm4-moe":
            base(kind)
            given |= {"paths.model": work / kind, "paths.base": work / f"{kind}-base"}
        if kind in alone:
            output_marks.take(place / name, output_marks.REINFORCEMENT)
            shutil.copytree(alone[kind] / "data", place / name / "data")
        process, folder = forked(name, KEYS | given, module)
        assert process.wait(900) == 0, (place / f"{name}.log").read_text()[-4000:]
        alone.setdefault(kind, folder)
        return folder

    return learned


def require_alike(found: Path, expected: Path) -> None:
    assert answers(found) == answers(expected)
    assert norms(found) == pytest.approx(norms(expected), rel=1e-4)
    lines = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "reinforce"]
    assert len(steps) == STEPS and all(max(line["probe"], line["mismatch"]) < 1e-6 for line in steps)
    assert any(len(set(rewards)) > 1 for _, rewards in answers(found))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_over_two_workers_answers_are_those_of_one_by_every_way_of_weights(learned):
    expected = learned("one", {})
    require_alike(learned("gloo", TWO), expected)
    require_alike(learned("ipc", TWO | {"reinforce.transport": "ipc"}), expected)
    require_alike(learned("files", TWO | {"reinforce.transport": "files"}), expected)
    require_alike(learned("nccl", TWO, "tests.support.nccl_over_gloo"), expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_over_two_workers_an_adapter_alone_gives_the_answers_of_one(learned):
    keys = ADAPTER | {"model": "llama", "reinforce.transport": "adapter"}
    require_alike(learned("two-adapted", keys | TWO), learned("one-adapted", keys))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_over_two_workers_the_experts_that_are_told_are_those_of_one(learned):
    found, expected = learned("two-replayed", TWO | REPLAYED), learned("one-replayed", REPLAYED)
    require_alike(found, expected)
    assert routes(found) == routes(expected) and all(routes(found))


def routes(folder: Path) -> list[str]:
    steps = [json.loads(path.read_text()) for path in sorted((folder / "rollouts").glob("0*.json"))]
    return [answer["routes"] for step in steps for group in step["groups"] for answer in group["answers"]]


SAID = {
    "unheard": "model.layers.1.self_attn.o_proj.weight did not reach worker 1 of vLLM",
    "halved": "probe: vLLM and Megatron differ by ",
    "flipped": "is not what was sent: digest",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", SAID)
def test_weights_that_one_of_the_workers_has_wrongly_end_the_run_in_that_step(fault, forked, place):
    process, folder = forked(fault, KEYS | TWO, "tests.support.planted_in_a_worker", PLANTED=fault)
    assert process.wait(500) == 2, (place / f"{fault}.log").read_text()[-4000:]
    (line,) = [one for one in (place / f"{fault}.log").read_text().splitlines() if one.startswith("error: ")]
    assert SAID[fault] in line
    assert len(answers(folder)) < STEPS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_worker_that_is_killed_ends_its_engine_and_nothing_is_left_and_the_next_start_goes_on(start, finish, place):
    keys = KEYS | TWO | {"reinforce.steps": 200, "checkpoint.save_every": 2}
    process, folder = start("killed", keys)
    until(folder / "rollouts" / "000003.json", process)
    (vllm,) = [one for one in psutil.Process(process.pid).children() if "vllm_process" in " ".join(one.cmdline())]
    workers = [one for one in vllm.children() if "Worker" in one.name()]
    assert len(workers) == 2
    shared = memory([vllm, *workers])
    os.kill(workers[1].pid, signal.SIGKILL)
    assert process.wait(60) == 2
    (line,) = [one for one in (place / "killed.log").read_text().splitlines() if one.startswith("error: ")]
    assert "rollout: " in line and "vLLM's process has ended with code 1" in line
    assert "has ended with code -9" in (place / "killed-logs" / "rollout.log").read_text()
    gone([vllm, *workers])
    made = len(answers(folder))
    first = answers(folder)

    process, folder = start("killed", keys)
    until(folder / "rollouts" / f"{made + 1:06d}.json", process)
    assert answers(folder)[:made] == first
    everybody = psutil.Process(process.pid).children(recursive=True)
    shared |= memory(everybody)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone(everybody)
    end = time.monotonic() + 10
    while any(one.exists() for one in shared) and time.monotonic() < end:
        time.sleep(0.1)
    assert shared and not [one for one in shared if one.exists()]


def memory(processes: list[psutil.Process]) -> set[Path]:
    """Return the files in shared memory that these processes use. Other tests may run at the same time."""
    files = (Path(one.path) for process in processes for one in process.memory_maps())
    return {file for file in files if file.is_relative_to(MEMORY)}


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def until(path: Path, process) -> None:
    end = time.monotonic() + 600
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
