"""conf/rewards.py: what is wrong with a reward of one's own is told before anything runs."""

import os

import pytest

from conf import rewards
from conf.load import load
from conf.rules import reinforcement
from contract.faults import ConfigError, Fault

FILES = {
    "good.py": "def mine(prompt, answer, reference):\n    return 1.0",
    "given.py": "from statistics import mean as mine",
    "all.py": "from statistics import *",
    "made.py": "globals()['mine'] = lambda **asked: 1.0",
    "either.py": "try:\n    import numpy\nexcept ImportError:\n    mine = None\nelse:\n    mine = len\n'\\d'",
    "half.py": "def mine(prompt, answer, reference):\n    return (1",
    "other.py": "def yours(prompt, answer, reference):\n    return mine(answer)",
    "deep.py": "(" * 100_000,
    "nul.py": "a\0b",
    "empty.py": "",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xff")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "fifo.py")
    return tmp_path


def test_a_file_may_begin_with_a_mark_of_its_bytes_order(tmp_path):
    (tmp_path / "marked.py").write_text("\ufeffdef mine(): pass")
    assert rewards.function(f"{tmp_path}/marked.py:mine") == ("mine", "def mine(): pass")


@pytest.mark.parametrize("name", ["good", "given", "all", "made", "either"])
def test_a_function_may_come_by_any_way(folder, name, recwarn):
    assert rewards.function(f"{folder}/{name}.py:mine") == ("mine", FILES[f"{name}.py"])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("half.py:mine", r"half\.py: no Python: .* \(line 2\)$"),
        ("deep.py:mine", r"deep\.py: no Python: "),
        ("nul.py:mine", r"nul\.py: no Python: "),
        ("other.py:mine", r"other\.py: there is no mine in it$"),
        ("empty.py:mine", r"empty\.py: there is no mine in it$"),
        ("latin.py:mine", r"latin\.py: no UTF-8: invalid start byte at byte 2$"),
        ("folder.py:mine", r"folder\.py: a folder, not a file$"),
        ("fifo.py:mine", r"fifo\.py: a FIFO, not a file$"),
        ("nowhere.py:mine", r"nowhere\.py: no such file$"),
        ("good.py", r"good\.py: must be PATH\.py:NAME$"),
        ("good.py:a-b", r"good\.py:a-b: must be PATH\.py:NAME$"),
        ("good.mine", r"good\.mine: must be PATH\.py:NAME$"),
    ],
)
def test_a_function_that_cannot_be_is_one_line(folder, place, said):
    with pytest.raises(Fault, match=said) as fault:
        rewards.function(f"{folder}/{place}")
    assert "\n" not in str(fault.value)


CALL = r"; it is called as mine\(prompt=\.\.\., answer=\.\.\., reference=\.\.\.\)$"


@pytest.mark.parametrize(
    "line",
    [
        "def mine(prompt, answer, reference): ...",
        "def mine(reference, *, answer, prompt, strict=False): ...",
        "def mine(answer, **others): ...",
        "def mine(*all, **others): ...",
        "def mine(a): ...\nmine = wrapped(mine)",
        "@wrapped\ndef mine(a): ...",
        "def mine(a): ...\nfrom math import *",
    ],
)
def test_a_function_may_take_its_arguments_by_any_way(tmp_path, line):
    (tmp_path / "one.py").write_text(line)
    assert rewards.function(f"{tmp_path}/one.py:mine", rewards.CALLED_WITH["function"]) == ("mine", line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "mine takes no prompt, answer, reference"),
        ("question, answer, reference", "mine takes no prompt"),
        ("prompt, answer", "mine takes no reference"),
        ("prompt, answer, reference, /", "mine takes no prompt, answer, reference"),
        ("prompt, answer, reference, scale", "mine needs scale as well"),
        ("prompt, answer, reference, *, scale", "mine needs scale as well"),
        ("prompt, /, **others", "mine needs prompt as well"),
    ],
)
def test_a_function_that_cannot_be_called_is_one_line(tmp_path, arguments, said):
    (tmp_path / "one.py").write_text(f"def mine({arguments}):\n    return 1.0")
    with pytest.raises(Fault, match=rf"one\.py: {said}{CALL}"):
        rewards.function(f"{tmp_path}/one.py:mine", rewards.CALLED_WITH["function"])
    run = load("tiny-rl", ["reinforce.reward=function", f"reinforce.function={tmp_path}/one.py:mine"])
    with pytest.raises(Fault, match=rf"^reinforce\.function: \S*one\.py: {said}"):
        reinforcement.contents(run)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["reward=function", "function=json:loads"], "reinforce.function: json:loads: must be PATH.py:NAME"),
        (["turns=2", "environment=game.py"], "reinforce.environment: game.py: must be PATH.py:NAME"),
        (["reward_memory_gb=1e18"], "reinforce.reward_memory_gb: 1e+18 is too large: it must be at most 65536"),
    ],
)
def test_what_is_no_place_of_a_function_and_no_memory_is_told_as_the_configuration_is_read(keys, said):
    with pytest.raises(ConfigError) as error:
        load("tiny-rl", [f"reinforce.{key}" for key in keys])
    assert str(error.value).partition(": ")[2] == said


@pytest.mark.parametrize(
    ("reward", "keys", "said"),
    [
        ("regex", {"pattern": "(x"}, "reinforce.pattern: '(x' is not a regular expression: missing )"),
        ("json_schema", {"pattern": "{"}, "reinforce.pattern: '{' is not a JSON schema: "),
        (
            "json_schema",
            {"pattern": "[3]"},
            "reinforce.pattern: '[3]' is not a JSON schema: it must be an object, and its $schema",
        ),
        (
            "json_schema",
            {"pattern": '{"$schema": []}'},
            "not a JSON schema: it must be an object, and its $schema a text",
        ),
        (
            "json_schema",
            {"pattern": '{"type": "nix"}'},
            'reinforce.pattern: \'{"type": "nix"}\' is not a JSON schema: ',
        ),
        (
            "judge",
            {"judge": "http://"},
            "reinforce.judge: 'http://': no address of a server, such as http://HOST:8000/v1",
        ),
        (
            "judge",
            {"judge": "http://me:secret@a/v1"},
            "reinforce.judge: has a user or a password in it; JUDGE_API_KEY is",
        ),
        ("judge", {"judge": "http://a b/v1"}, "reinforce.judge: 'http://a b/v1': no address of a server"),
        ("judge", {"judge": "http://[::1/v1"}, "reinforce.judge: http://[::1/v1: Invalid IPv6 URL"),
        ("judge", {"judge": "http://a:x/v1"}, "reinforce.judge: http://a:x/v1: Port could not be cast"),
    ],
)
def test_a_pattern_or_an_address_that_is_none_is_told_as_the_configuration_is_read(reward, keys, said):
    keys |= {"judge_model": "m", "judge_prompt": "judge.txt"} if reward == "judge" else {}
    with pytest.raises(ConfigError) as error:
        load("tiny-rl", [f"reinforce.reward={reward}", *(f"reinforce.{key}={value!r}" for key, value in keys.items())])
    (line,) = [one for one in str(error.value).splitlines() if said in one]
    assert line.startswith("override reinforce.")


def test_a_judge_has_to_see_the_answer(tmp_path):
    (tmp_path / "judge.txt").write_text("How good, from 0 to 1? {anwser}")
    with pytest.raises(Fault, match=r"judge\.txt: has no \{answer\}: the judge would not see it$"):
        rewards.judge_prompt(f"{tmp_path}/judge.txt")
