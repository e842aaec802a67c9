"""What columns are taken for, and which rows are refused and why."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema.data import Part
from contract.faults import Fault
from trainer.data import rows
from trainer.data.read import shapes
from trainer.data.rows import Bad

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = [USER, ANSWER]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
RESULT = {"role": "tool", "content": "1"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": None}}}}


def shape(*first: dict, **part) -> shapes.Shape:
    return shapes.detect(Part(**part), first, "rows.jsonl")


def messages(*turns: dict) -> Any:
    return shape({"messages": TURNS}).row({"messages": list(turns)})


@pytest.mark.parametrize(
    ("row", "pair", "reason"),
    [
        ({"input": "q", "output": "a"}, ("q", "a"), "input -> input, output -> output: from the names of the columns"),
        (
            {"question": "q", "answer": "a"},
            ("q", "a"),
            "question -> input, answer -> output: from the names of the columns",
        ),
        ({"prompt": "q", "response": "a", "id": 3}, ("q", "a"), "from the names of the columns; not used: id"),
        ({"prompt": "q", "completion": "a"}, ("q", "a"), "completion -> output"),
        ({"query": "q", "response": "a"}, ("q", "a"), "query -> input"),
        ({"problem": "q", "solution": "a"}, ("q", "a"), "problem -> input"),
        ({"instruction": "q", "input": "c", "output": "a"}, ("q\n\nc", "a"), "input -> context"),
        ({"instruction": "q", "input": "", "output": "a", "text": "all"}, ("q", "a"), "not used: text"),
        ({"instruction": "q", "response": "a"}, ("q", "a"), "instruction -> input"),
        ({"source": "q", "target": "a"}, ("q", "a"), "source -> input"),
    ],
)
def test_pairs_by_name(row, pair, reason):
    found = shape(row)
    assert found.kind == "pairs"
    assert reason in found.reason
    assert found.row(row) == {"input": pair[0], "output": pair[1]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS}, TURNS),
        ({"conversation": TURNS}, TURNS),
        ({"prompt": "q", "prompt_id": "1", "messages": TURNS}, TURNS),
        ({"messages": json.dumps(TURNS)}, TURNS),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, TURNS),
        ({"conversations": [{"from": "User", "value": "q"}, {"from": "ChatGPT", "value": "a"}]}, TURNS),
        ({"messages": TURNS, "system": "s"}, [{"role": "system", "content": "s"}, *TURNS]),
        ({"messages": TURNS, "system": ""}, TURNS),
        ({"messages": [{"role": "system", "content": ""}, *TURNS]}, TURNS),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]}, TURNS),
        ({"prompt": [USER], "response": "a"}, TURNS),
        ({"prompt": [USER], "completion": [ANSWER]}, TURNS),
        ({"data_source": "gsm8k", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "a"}}, TURNS),
    ],
)
def test_conversations_by_name(row, expected):
    found = shape(row)
    assert found.kind == "messages"
    assert found.row(row) == {"messages": expected}


def test_tools_and_calls_become_objects():
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    turns += [{"from": "observation", "value": "1"}, {"from": "gpt", "value": "a"}]
    row = {"conversations": turns, "tools": json.dumps([ADD])}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    found = shape(row).row(row)
    assert isinstance(found, dict)
    assert found == {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, ANSWER],
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        ],
    }
    assert messages(USER, CALL, RESULT, ANSWER) == {"messages": found["messages"]}


def test_configured_columns_win_and_reach_into_objects():
    row = {"prompt": [USER], "extra_info": {"question": "q", "answer": "a"}, "a.b": "literal", "a": {"b": "inner"}}
    found = shape(row, input="extra_info.question", output="extra_info.answer")
    assert found.row(row) == {"input": "q", "output": "a"}
    assert found.reason.startswith("extra_info.question -> input, extra_info.answer -> output: from the configuration")
    assert shape(row, input="a.b", output="extra_info.answer").row(row) == {"input": "literal", "output": "a"}
    assert shape({"question": "q", "answer": "a"}, input="question").row({"question": "q", "answer": "a"})
    system = shape({"q": "q", "a": "a", "s": "be brief"}, input="q", output="a", system="s")
    assert system.row({"q": "q", "a": "a", "s": "s"}) == {"messages": [{"role": "system", "content": "s"}, *TURNS]}


@pytest.mark.parametrize(
    ("first", "part", "words"),
    [
        ({"question": "q", "answer": "a", "response": "b"}, {}, ["several readings", "answer -> output; or question"]),
        ({"messages": TURNS, "conversations": TURNS}, {}, ["messages -> messages; or conversations"]),
        (
            {"a": "x", "b": 3, "c": [USER]},
            {},
            ["no known columns", "a (text), b (number), c (list of objects)"],
        ),
        ({"text": "x", "content": "y"}, {}, ["several readings"]),
        ({"question": "q"}, {"input": "query"}, ["no column query (data.input)", "question (text)"]),
        ({"question": "q"}, {"input": "question"}, ["data.output is missing: no column has a known name"]),
        ({"question": "q", "answer": "a"}, {"text": "answer", "input": "question"}, ["cannot be combined"]),
        ({"question": "q", "answer": "a"}, {"shape": "text"}, ["no known columns"]),
        ({"question": "q", "answer": "a"}, {"shape": "messages", "input": "question"}, ["data.shape is messages"]),
        ({}, {}, ["no columns"]),
    ],
)
def test_what_cannot_be_told_lists_the_columns(first, part, words):
    with pytest.raises(Fault) as fault:
        shape(first, **part)
    line = str(fault.value)
    assert line.startswith("rows.jsonl: ") and "\n" not in line
    assert all(word in line for word in words), line


def test_a_shape_that_is_asked_for_decides():
    row = {"messages": [{"from": "human", "value": "q"}], "question": "q", "answer": "a", "text": "t"}
    assert shape(row, shape="pairs").kind == "pairs"
    assert shape(row, shape="sharegpt").kind == "messages"
    assert shape(row, shape="text").row(row) == {"text": "t"}
    assert shape({"text": "t", "url": "u"}).reason == "text -> text: from the names of the columns; not used: url"


@pytest.mark.parametrize(
    ("row", "bad"),
    [
        ({"answer": "a"}, Bad("no such column", "question", "the columns are answer")),
        ({"question": "q", "answer": 72}, Bad("not text", "answer", "72")),
        ({"question": None, "answer": "a"}, Bad("not text", "question", "null")),
        ({"question": " ", "answer": "a"}, Bad("empty", "question", '" "')),
        ({"question": "q", "answer": "\n"}, Bad("empty answer", "answer", '"\\n"')),
        ({"question": "q", "answer": "\ud83d"}, Bad("half of a surrogate pair", "answer", "'\\ud83d'")),
    ],
)
def test_bad_pairs(row, bad):
    assert shape({"question": "q", "answer": "a"}).row(row) == bad


def test_numbers_for_answers_are_bad_rows_and_no_riddle():
    assert shape({"question": "q", "answer": 72}).row({"question": "q", "answer": 72}) == Bad(
        "not text", "answer", "72"
    )


@pytest.mark.parametrize(
    ("turns", "reason", "field"),
    [
        ([], "no messages", "messages"),
        ([ANSWER], "wrong role order", "messages[0].role"),
        ([USER], "no answer", "messages"),
        ([USER, ANSWER, USER], "does not end with an answer", "messages[2].role"),
        ([USER, USER, ANSWER], "wrong role order", "messages[1].role"),
        ([USER, ANSWER, ANSWER], "wrong role order", "messages[2].role"),
        ([USER, {"role": "system", "content": "s"}, ANSWER], "wrong role order", "messages[1].role"),
        ([USER, RESULT, ANSWER], "wrong role order", "messages[1].role"),
        ([USER, {"role": "critic", "content": "a"}], "unknown role", "messages[1].role"),
        ([USER, {"role": ["assistant"], "content": "a"}], "unknown role", "messages[1].role"),
        ([USER, {"role": "assistant", "content": 7}], "not text", "messages[1].content"),
        ([USER, {"role": "assistant"}], "empty answer", "messages[1].content"),
        ([USER, {"role": "assistant", "content": [{"type": "image_url"}]}], "not text", "messages[1].content[0]"),
        ([USER, "a"], "message is not an object", "messages[1]"),
        ([USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, ANSWER], None, ".arguments"),
        ([USER, CALL | {"tool_calls": [{"arguments": {}}]}, ANSWER], "tool call without a name", "tool_calls[0]"),
        ([USER, CALL | {"tool_calls": "{"}, ANSWER], "not JSON", "messages[1]"),
    ],
)
def test_bad_conversations(turns, reason, field):
    bad = messages(*turns)
    assert isinstance(bad, Bad)
    assert bad.field.endswith(field)
    assert reason is None or bad.reason == reason


def test_bad_tools_and_conversations_that_are_none():
    found = shape({"messages": TURNS, "tools": None})
    assert found.row({"messages": TURNS, "tools": ["f"]}) == Bad("tools are not a list of objects", "tools", '["f"]')
    assert found.row({"messages": "hello"}) == Bad("not a list of messages", "messages", '"hello"')
    assert found.row({"messages": TURNS, "tools": [{"x": float("nan")}]}) == Bad("not JSON", "tools.x", "a float")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.characters(categories=["Cs"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call"]) | ANYTHING
TURN = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("content", "value", "tool_calls", "name"), ANYTHING) | {"role": ROLE, "from": ROLE}
)
VALUE = ANYTHING | st.lists(TURN, max_size=4) | st.just(TURNS)
COLUMNS = ("input", "output", "instruction", "messages", "tools", "system", "text", "prompt", "response")
SHAPES = [
    shape({"input": "q", "output": "a"}),
    shape({"instruction": "q", "input": "", "output": "a"}),
    shape({"messages": TURNS, "tools": None, "system": ""}),
    shape({"prompt": [USER], "response": "a"}),
    shape({"text": "t"}),
]


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS, VALUE)), st.sampled_from(SHAPES))
def test_any_row_is_canonical_or_bad(raw, found):
    row = found.row(raw)
    if isinstance(row, Bad):
        assert row.reason and row.field and "\n" not in row.reason
        assert (row.field + row.shown).encode()
    else:
        assert rows.content(row)
        assert row.keys() <= {"input", "output", "messages", "tools", "text"}


@given(st.dictionaries(st.sampled_from(COLUMNS) | st.text(max_size=3), VALUE))
def test_any_first_row_is_told_or_a_fault(raw):
    try:
        found = shape(raw)
    except Fault:
        return
    found.row(raw)
