"""Messages come back as they went, with the keys that they have always had; what is no message is one line."""

import json

import pytest

from contract.faults import Fault
from tasks.gang.messages import End, Member, Peers, Sign, Standing, Word, by

SIGN = Sign(1, 4711, 12, "training", age=0.4, idle=1, state="S", silent=False, stalled=False)
END = End(1, -9, 12, ("ValueError: x", "über"), silent=False, state="", stalled=True)
WORD = Word("a1", "gathering", 1, "/runs/probe", ("10.0.0.1", "127.0.0.1"), 4000)
MEMBER = Member("b2", "n1", "waiting", "10.0.0.2", 4001, 4002, "token", "rack1")
MESSAGES = [
    WORD,
    Word("a1", "go", 7, "/runs/probe", ("10.0.0.1",), 4000, order=(1, 0), master=("10.0.0.2", 4002), key="f1"),
    Word("a1", "stop", 9, "/runs/probe", ("10.0.0.1",), 4000, reason="done", save=True, closed=True),
    MEMBER,
    Member("b2", "n1", "running", ranks=(SIGN, SIGN), free=0),
    Member("b2", "n1", "failed", failed=(END, End(2, None, 0, (), False, "D", False)), oom_kills=1, kernel=("Xid",)),
    Member("b2", "n1", "preempted", reason="told to end", told=True, over=True),
    Peers({"0": ("10.0.0.2", 4001), "11": ("10.0.0.3", 4003)}),
    Standing("train-6a8e", 3, "go"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_was_said_is_what_is_heard(message):
    assert type(message).from_json(message.to_json(), "here") == message


def test_keys_stay_what_readers_of_other_versions_know():
    assert json.loads(MESSAGES[1].to_json()) == {
        "addresses": ["10.0.0.1"],
        "beat": 7,
        "by": "a1",
        "key": "f1",
        "master": ["10.0.0.2", 4002],
        "order": [1, 0],
        "port": 4000,
        "probe": "/runs/probe",
        "state": "go",
    }
    assert json.loads(MESSAGES[6].to_json()) == {
        "by": "b2",
        "host": "n1",
        "over": True,
        "reason": "told to end",
        "state": "preempted",
        "told": True,
    }
    assert json.loads(MESSAGES[4].to_json())["ranks"][0] == {
        "age": 0.4,
        "idle": 1,
        "phase": "training",
        "pid": 4711,
        "rank": 1,
        "silent": False,
        "stalled": False,
        "state": "S",
        "step": 12,
    }
    assert json.loads(MESSAGES[7].to_json()) == {"0": ["10.0.0.2", 4001], "11": ["10.0.0.3", 4003]}


@pytest.mark.parametrize(
    "kind, data, says",
    [
        (Member, b'{"by": "x", "state": "waiting"}', "host: Field required"),
        (Member, b'{"by": "x", "host": "n", "state": "waiting", "colour": 1}', "colour: Unexpected keyword argument"),
        (Member, b'{"by": "x", "host": "n", "state": "asleep"}', "state: Input should be 'waiting', 'running', "),
        (
            Member,
            b'{"by": "x", "host": "n", "state": "failed", "failed": [{"rank": 0}]}',
            r"failed\.0\.code: Field required",
        ),
        (
            Member,
            b'{"by": "x", "host": "n", "state": "running", "free": "much"}',
            "free: Input should be a valid int",
        ),
        (Member, b'{"by": "x", "host": "n", "state": "running", "over": 1}', "over: Input should be a valid boolean"),
        (Member, b'{"by": "x", "host": "n", "state": "running", "ranks": {}}', "ranks: Input should be a valid array"),
        (Word, b'{"by": "x", "state": "go", "master": ["10.0.0.1"]}', r"master\.1: Field required"),
        (Word, b'{"by": "x", "state": "go", "order": [true]}', r"order\.0: Input should be a valid integer"),
        (Word, b'{"by": "x", "state": "go"', "Invalid JSON: EOF"),
        (Word, b"\xff\xff", "Invalid JSON: "),
        (Word, b"[]", "Input should be an object"),
        (Standing, b"", "Invalid JSON: EOF"),
        (Peers, b'{"0": ["10.0.0.1", "4"]}', r"0\.1: Input should be a valid integer"),
        (Peers, b"7", "Input should be an object"),
    ],
)
def test_what_is_damaged_or_another_version_s_is_one_line(kind, data, says):
    with pytest.raises(Fault, match=says) as refused:
        kind.from_json(data, "gangs/g/1/x.json")
    line = str(refused.value)
    assert line.startswith(f"gangs/g/1/x.json: not a {kind.__name__} as this version of the project writes it (")
    assert "\n" not in line and len(line) < 300


def test_whoever_wrote_a_message_is_known_whatever_its_version():
    assert by(MEMBER.to_json()) == "b2"
    assert by(b'{"by": "z", "new": 1}') == "z"
    assert by(b"[]") is None
