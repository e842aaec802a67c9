"""Several engines: prompts are shared out, and those of an engine that ends are asked of the others."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from contract.faults import Fault
from trainer.reinforcement.engines import engine
from trainer.reinforcement.engines.engine import Group, LocalEngine, Lost
from trainer.reinforcement.rollouts import Rollouts

KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.reinforcement.engines import engine
engine.PROGRAM = "tests.support.stand_in_engine"
one = engine.LocalEngine("engine 0", {"key": "secret"}, Path(sys.argv[1]), {})
one.ready()
print(one.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
PROMPTS = [[number] for number in range(10, 20)]
SEEDS = list(range(10))


class StandIns(Rollouts):
    """Engines that stand in for vLLM's, with settings of their own each."""

    def __init__(self, folder: Any, *settings: dict[str, Any]):
        Group.__init__(self, len(settings), far=False)
        self.meeting = None
        self.engines = [
            LocalEngine(f"engine {number}", given, folder / f"rollout-{number}.log", {})
            for number, given in enumerate(settings)
        ]


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "PROGRAM", "tests.support.stand_in_engine")
    opened: list[StandIns] = []

    def engines(*settings: dict[str, Any]) -> StandIns:
        opened.append(StandIns(tmp_path, *settings))
        opened[-1].ready()
        return opened[-1]

    yield engines
    for one in opened:
        one.close()


def asked(engines: StandIns, prompts: list[list[int]]) -> tuple[list[list[int]], set[str]]:
    """Seeds that came back for the prompts, which have to be in order, and who answered."""
    found = engines.answer(prompts, SEEDS[: len(prompts)], max_tokens=4)
    assert [prompt for prompt, *_ in found] == prompts
    return [tokens for _, ((tokens, *_),), _ in found], {text for _, ((*_, text, _, _),), _ in found}


def test_every_engine_has_a_share_and_answers_come_in_the_order_of_prompts(engines):
    three = engines({}, {}, {})
    tokens, who = asked(three, PROMPTS)
    assert tokens == [[seed] for seed in SEEDS] and len(who) == 3
    tokens, who = asked(three, PROMPTS[:2])
    assert tokens == [[0], [1]] and len(who) == 2


def test_prompts_of_an_engine_that_ends_while_it_answers_are_asked_of_the_others(engines, capfd):
    three = engines({}, {"dies": True}, {})
    prompts = [*PROMPTS[:4], [0], *PROMPTS[5:]]
    tokens, who = asked(three, prompts)
    assert tokens == [[seed] for seed in SEEDS] and len(who) == 2
    assert "engine 1 is removed, and 2 of 3 engines continue" in capfd.readouterr().out
    assert asked(three, PROMPTS)[0] == tokens


def test_an_engine_that_is_killed_is_told_of_at_once_and_left_out_of_what_comes(engines, capfd):
    two, told = engines({"seconds": 1}, {"seconds": 1}), threading.Event()
    for one in two.engines:
        one.watch(lambda ended: told.set())
    began = time.monotonic()
    killer = threading.Timer(0.3, lambda: os.kill(two.engines[1].process.pid, signal.SIGKILL))
    killer.start()
    tokens, who = asked(two, PROMPTS)
    assert tokens == [[seed] for seed in SEEDS] and len(who) == 1
    assert told.wait(5) and time.monotonic() - began < 15
    assert two.each("finish", version=3).keys() == {two.engines[0]} and two.engines[0].version == 3


def test_an_engine_has_no_key_to_the_judge(engines, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    monkeypatch.setenv("LOCAL_RANK", "0")
    (one,) = engines({}).engines
    environment = Path(f"/proc/{one.process.pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"secret" not in environment and b"LOCAL_RANK" not in environment


def test_the_last_engine_that_ends_ends_the_run_with_one_line(engines):
    two = engines({"dies": True}, {"dies": True})
    with pytest.raises(Lost, match=r"^rollout: answer: vLLM's process has ended with code 9 \(.*\)$"):
        asked(two, [[0], [0]])


def test_an_error_of_one_process_is_its_own_and_a_fault_of_the_run_ends_all(engines):
    two = engines({}, {})
    with pytest.raises(Lost, match=r"^rollout: answer: prompt \[1\]"):
        asked(two, [*PROMPTS[:9], [1]])  # the other one has it as well
    assert len(two.engines) == 1
    two = engines({}, {})
    with pytest.raises(Fault, match=r"^rollout: answer: prompt \[2\]") as caught:
        asked(two, [*PROMPTS[:9], [2]])
    assert not isinstance(caught.value, Lost) and len(two.engines) == 2


def test_a_trainer_that_is_killed_leaves_no_file_of_what_its_engine_was_told(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "rollout.log")]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL and int(done.stdout)
    assert not [*temporary.iterdir()]


def test_an_engine_that_was_left_out_is_asked_nothing_more(engines):
    """A transfer waits for what it began with each engine, also where one was lost meanwhile."""
    two = engines({}, {})
    lost, other = two.engines
    lost.process.kill()
    lost.process.wait()
    assert two.attempt(lost, lambda: lost.call("answer")) == [] and two.engines == [other]
    assert two.attempt(lost, lambda: lost.call("answer")) == [] and two.engines == [other]
