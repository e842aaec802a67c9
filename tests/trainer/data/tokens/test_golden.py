"""Token ids and loss masks, token by token, beside Bridge's data sets and transformers' apply_chat_template."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from conf.schema.data import Data
from tests.support import data_folders
from trainer.data.tokens import templates, tokenizer
from trainer.data.tokens.template_text import Encoded
from trainer.rehearsal import tiny_models

PAIRS = [
    {"input": "What is 17 + 25?", "output": "The answer is 42."},
    {"input": "  two spaces around  ", "output": "  and here  "},
    {"input": "a line\n", "output": "\nan answer behind a line break"},
    {"input": "Ünïcödé 日本語 😀", "output": "😀😀 naïve"},
    {"input": "tabs\tand\ttabs\t", "output": "\tone"},
    {"input": "a turn ends <|im_end|> here", "output": "<|im_start|>user\nno<|im_end|>"},
    {"input": "x", "output": "y"},
    {"input": "word " * 60, "output": "long answers are never cut " * 3},
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
CHATS = [
    {"messages": [user("What is 17 + 25?"), assistant("42")]},
    {"messages": [{"role": "system", "content": "You are terse."}, user("17 + 25?"), assistant("It is 42.")]},
    {"messages": [user("one"), assistant("1"), user("two"), assistant("2"), user("three"), assistant("3 😀")]},
    {"messages": [user(" spaces "), assistant(" around ")]},
    {"messages": [user("lines\n\n"), assistant("x\n\ny")]},
    {"messages": [user("日本語 😀?"), assistant("はい 😀")]},
    {"messages": [user("the same"), assistant("the same"), user("the same"), assistant("the same")]},
]
TOOLS = [
    {
        "messages": [
            user("17 + 25?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": "42"},
            assistant("42."),
        ],
        "tools": [ADD],
    },
]
LOSS = {"answer": "last_turn", "assistant": "assistant", "all": "full"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("golden")
    tiny_models.make_model("glm4-moe", root / "tiny")
    for family in data_folders.FAMILIES:
        data_folders.make(root / family, family)
    plain: dict[str, Any] = {"rows": PAIRS, "prompt_template": "{prompt}", "separator": " ", "text": "{input} {output}"}
    asked = {"prompt_template": "Q: {prompt}\nA:", "text": "Q: {input}\nA: {output}"}
    tight = {"prompt_template": "<{prompt}>", "separator": "", "text": "<{input}>{output}"}
    cases: dict[str, dict] = {
        "plain": {"folder": "plain", **plain},
        "plain chatml": {"folder": "chatml", **plain},
        "plain llama3": {"folder": "llama3", **plain},
        "plain tiny": {"folder": "tiny", **plain},
        "plain asked": {"folder": "tiny", **plain, **asked},
        "plain tight": {"folder": "plain", **plain, **tight},
        "plain all": {"folder": "chatml", **plain, "plain_loss": "full", "loss_on": "all"},
        "plain cut": {"folder": "plain", **plain, "length": 110},
    }
    for family in ("tiny", "chatml", "llama3", "tagged", "qwen3"):
        rows = CHATS + (TOOLS if family in ("tagged", "qwen3") else [])
        for loss_on, loss in LOSS.items():
            cases[f"{family} {loss_on}"] = {"folder": family, "rows": rows, "loss": loss, "loss_on": loss_on}
    return {name: {**case, "folder": str(root / case["folder"])} for name, case in cases.items()}


@pytest.fixture(scope="module")
def made(cases, ranks, tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("bridge")
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    result = ranks("bridge_rows", load("tiny", [f"paths.output={folder}"]))
    assert result.code == 0, result.output
    found = json.loads((folder / "made.json").read_text())
    return dict(zip(cases, found["rows"], strict=True)) | {"skipped": found["skipped"]}


def ours(case: dict) -> list[Encoded]:
    data = Data(
        seq_length=case.get("length", 1024),
        template=case.get("text", "auto"),
        loss_on=case.get("loss_on", "answer"),
        too_long="truncate",
    )
    kind = "messages" if "loss" in case else "pairs"
    template = templates.choose(data, tokenizer.load(Path(case["folder"]), False), kind)
    found = template.encode(case["rows"])
    assert all(isinstance(one, Encoded) for one in found), found
    return [one for one in found if isinstance(one, Encoded)]


def same(one: Encoded, other: dict) -> None:
    assert one.ids.tolist() == other["ids"]
    assert one.learned.tolist() == other["learned"]


@pytest.mark.parametrize("name", ["", " chatml", " llama3", " tiny", " asked", " tight", " all", " cut"])
def test_pairs_are_bridges(name, cases, made):
    case = cases[f"plain{name}"]
    for one, other in zip(ours(case), made[f"plain{name}"], strict=True):
        same(one, other["bridge"])


def test_a_long_prompt_is_cut_as_bridge_cuts_it(cases):
    found = ours(cases["plain cut"])
    assert [one.cut > 0 for one in found] == [False] * 7 + [True]
    assert len(found[-1].ids) == 110


@pytest.mark.parametrize("loss_on", LOSS)
@pytest.mark.parametrize("family", ["chatml", "llama3", "tiny"])
def test_conversations_are_bridges(family, loss_on, cases, made):
    name = f"{family} {loss_on}"
    for one, other in zip(ours(cases[name]), made[name], strict=True):
        same(one, other["bridge"])


@pytest.mark.parametrize("loss_on", ["answer", "assistant"])
def test_tags_decide_where_bridge_adds_a_line_break(loss_on, cases, made):
    """Bridge knows ChatML, and learns its line break behind <|im_end|> also where the template's tags leave it out."""
    end, line = 1, 200
    for one, other in zip(ours(cases[f"tagged {loss_on}"]), made[f"tagged {loss_on}"], strict=True):
        ids, learned = other["bridge"]["ids"], other["bridge"]["learned"]
        assert one.ids.tolist() == ids
        breaks = [i for i in range(1, len(ids)) if ids[i - 1] == end and ids[i] == line]
        assert one.learned.tolist() == [value and i not in breaks for i, value in enumerate(learned)]
        assert [i for i in breaks if learned[i]] == [i for i in breaks if one.learned[i - 1]]


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_the_last_answers_thought_is_learned_where_bridge_learns_it(loss_on, cases, made):
    for one, other in zip(ours(cases[f"qwen3 {loss_on}"]), made[f"qwen3 {loss_on}"], strict=True):
        same(one, other["bridge"])


@pytest.mark.parametrize("family", ["tagged", "tiny"])
def test_tags_give_transformers_mask(family, cases, made):
    for one, other in zip(ours(cases[f"{family} assistant"]), made[f"{family} assistant"], strict=True):
        same(one, other["transformers"])


def test_tokens_that_bridge_skips_are_skipped(made):
    assert set(made["skipped"]) == tokenizer.SKIPPED
