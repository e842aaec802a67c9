"""Answers of several turns: what an environment hears and says, and which tokens the policy is trained on."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from contract.faults import ConfigError, Fault
from trainer.reinforcement.batches import Form, micro_batches
from trainer.reinforcement.guarded import environment
from trainer.reinforcement.guarded.environment import Environment
from trainer.reinforcement.samples import Answer, Group, Scored

SOURCE = """
def adds(prompt, answers, reference):
    if answers[-1].startswith("add"):
        return f"={sum(map(int, answers[-1].split()[1:]))};"
def number(prompt, answers, reference):
    return 3
def half(prompt, answers, reference):
    return chr(0xD800)
def raises(prompt, answers, reference):
    raise KeyError(prompt)
def longer(prompt, answers, reference):
    return "x" * 5000
"""


@pytest.fixture
def made(tmp_path):
    """made(name, turns, room) -> an environment of the file's; a letter is a token."""
    file = tmp_path / "environment.py"
    file.write_text(SOURCE)
    started: list[Environment] = []

    def made(name: str, turns: int = 3, room: int = 40) -> Environment:
        asked = SimpleNamespace(turns=turns, max_tokens=room, environment=f"{file}:{name}")
        asked.reward_seconds, asked.reward_memory_gb = 20.0, 1.0
        run: Any = SimpleNamespace(reinforce=asked)
        tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [*map(ord, text)])
        template: Any = SimpleNamespace(tokenizer=tokenizer, without_end=lambda text: text.removesuffix("."))
        started.append(Environment(run, template))
        return started[-1]

    yield made
    for one in started:
        one.worker.close()


def answer(text: str, ended: bool = True) -> Answer:
    return Answer([*map(ord, text)], [-0.5] * len(text), text, ended)


def asking(*texts: str):
    """What answers prompts, with these texts in turn, and a list of what it was asked."""
    left, asked = [*texts], []

    def ask(prompts: list[list[int]], seeds: list[int], limits: list[int]) -> list[Answer]:
        asked.append(([*map(written, prompts)], limits, len({*seeds})))
        return [answer(left.pop(0)) for _ in prompts]

    return ask, asked


def written(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def said(group: Group) -> tuple[str, str]:
    return "Q:", "5"


def test_a_reply_is_read_and_not_trained_on_and_the_last_answer_counts(made):
    groups = [Group(0, [ord("Q")], [answer("add 2 3."), answer("5.")])]
    ask, asked = asking("5.")
    made("adds").play(groups, said, ask, Random(0))
    tool, plain = groups[0].answers
    assert asked == [(["Qadd 2 3.=5;"], [40 - 11], 1)]
    assert written(tool.tokens) == "add 2 3.=5;5." and tool.text == "5." and tool.ended
    assert written([token for token, one in zip(tool.tokens, tool.log_probs, strict=True) if one is None]) == "=5;"
    assert tool.sampled == 10 and plain.sampled == len(plain.tokens) == 2


def test_a_conversation_ends_with_its_turns_its_room_or_an_answer_that_has_no_end(made):
    groups = [Group(0, [ord("Q")], [answer("add 1 1."), answer("add 1 1.", ended=False)])]
    ask, asked = asking("add 2 2.", "never asked")
    made("adds", turns=2).play(groups, said, ask, Random(0))
    assert len(asked) == 1 and len(asked[0][0]) == 1  # what was cut by the limit is over

    groups = [Group(0, [ord("Q")], [answer("add 1 1.")])]
    made("adds", room=11).play(groups, said, ask, Random(0))
    assert len(asked) == 1 and written(groups[0].answers[0].tokens) == "add 1 1." and not groups[0].answers[0].ended


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("number", "it returned a int; it must return text or None"),
        ("raises", "KeyError: 'Q:'"),
        ("longer", "it returned 5000 characters; 4096 at most"),
        (
            "half",
            "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed",
        ),
    ],
)
def test_what_is_no_reply_ends_the_run_with_a_line(name, told, made):
    groups = [Group(0, [ord("Q")], [answer("add 2 3.")])]
    with pytest.raises(Fault) as fault:
        made(name).play(groups, said, asking()[0], Random(0))
    assert str(fault.value) == f"reinforce.environment: after the answer 'add 2 3': {told}"


def test_an_environment_that_cannot_be_loaded_is_told_before_anything_is_sampled(made, tmp_path):
    with pytest.raises(Fault, match=r"^reinforce.environment: .*environment\.py: there is no absent in it$"):
        made("absent")
    run = load("tiny-rl", ["reinforce.turns=2", f"reinforce.environment={tmp_path}/none.py:reply"])
    with pytest.raises(Fault, match=r"^reinforce.environment: .*none.py"):
        environment.check(run)


@pytest.mark.parametrize("form", [Form(2, 32, 0, 1), Form(1, 32, 16, 1)])
def test_a_batch_counts_no_token_of_the_environment(form):
    one = Scored([1, 2], [3, 4, 5, 6], [-0.1, None, None, -0.4], 1.0, [-0.1, -9.0, -9.0, -0.4], None)
    (batch,) = micro_batches([one], form, 0, 1)
    assert batch["mask"][0].tolist() == [1, 0, 0, 1] and batch["loss_mask"].sum() == 2
    assert batch["labels"].flatten()[batch["places"][0]].tolist() == [3, 4, 5, 6]  # all of them are read
    assert batch["counts"].tolist() == [4]


def test_turns_and_an_environment_go_together(tmp_path):
    for keys, problem in (
        (["reinforce.turns=2"], "required with reinforce.turns 2, and missing"),
        (["reinforce.environment=a.py:b"], "has no effect with reinforce.turns 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load("tiny-rl", keys)
