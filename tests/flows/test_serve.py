"""python -m flows.serve: what it says and refuses, in this process; and, slow, a model served and asked."""

import json
from pathlib import Path

import pytest

from contract.served_model import KEY
from flows import serve
from tasks.serving import questions, server
from tasks.store import open_store
from tests.support.exports import ROWS, evaluated, exported

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """An export in the store of this environment."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    monkeypatch.delenv("FINETUNE_STORE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(KEY, raising=False)
    return exported(open_store(str(tmp_path / "store")), "first", adapter={})


@pytest.fixture
def answers(monkeypatch):
    """A server that answers at once, and ends."""
    asked = []

    def keep(served, folder, say, stop, answered, turn):
        asked.append(served)
        answered(3.0)

    monkeypatch.setattr(server, "keep", keep)
    return asked


def test_it_says_what_is_served_where_and_how_to_ask(made, answers, capsys):
    assert serve.main([made.key, "--port", "8123"]) == 0
    said = capsys.readouterr().out
    assert f"serving {made.key} (merged, bf16) at http://127.0.0.1:8123/v1, after 3 s; ask:" in said
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("-d ")]
    asked = json.loads(line.removeprefix("-d '").removesuffix("'"))
    assert asked == {
        "model": made.key.replace("/", "-"),
        "temperature": 0,
        "messages": [{"role": "user", "content": ROWS[0]["input"]}],
    }
    assert 'OpenAI(base_url="http://127.0.0.1:8123/v1", api_key="none")' in said and "Authorization" not in said


def test_the_key_is_named_and_never_shown(made, answers, capsys, monkeypatch):
    monkeypatch.setenv(KEY, "s3cr3t-marker")
    assert serve.main([made.key, "--host", "0.0.0.0"]) == 0
    said = capsys.readouterr().out
    assert f'"Authorization: Bearer ${KEY}"' in said and f'os.environ["{KEY}"]' in said and "s3cr3t" not in said


def test_the_form_with_an_adapter_is_said(made, answers, capsys):
    assert serve.main([made.key, "--adapter"]) == 0
    assert "(base and adapter, bf16)" in capsys.readouterr().out
    assert answers[0].adapter.endswith("files/adapter")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nothing"], "error: nothing: neither a model in the registry at sqlite:///"),
        (["export/ffff"], "error: export/ffff: names 0 exports"),
        (["tickets@"], "error: tickets@: behind the @ stands a version or an alias"),
        (["nothing", "--host", "0.0.0.0"], "error: --host 0.0.0.0: others reach it, and nothing asks them for a key"),
    ],
)
def test_a_refusal_is_one_line(made, answers, capsys, arguments, said):
    assert serve.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(said) and shown.err.count("\n") == 1 and not answers


def test_a_check_needs_an_evaluation_with_answers(made, answers, capsys):
    assert serve.main([made.key, "--check"]) == 2
    assert f"the store has no evaluation of {made.key} to compare with" in capsys.readouterr().err
    evaluated(serve.open_run_store(), made, [])
    assert serve.main([made.key, "--check"]) == 2
    assert "it kept no answers of held_out" in capsys.readouterr().err


@pytest.mark.parametrize("differing, code", [(0, 0), (1, 1)])
def test_a_check_says_what_it_compared(made, answers, capsys, monkeypatch, differing, code):
    evaluation = evaluated(serve.open_run_store(), made, ["team 0", "team 1"])

    def ask(url, key, name, asked, limit, stop, required):
        differ = [questions.Difference("chat", one.prompt, "x", one.answer) for one in asked[:differing]]
        return questions.Compared({"chat": len(asked)}, differ, required)

    monkeypatch.setattr(questions, "ask", ask)
    assert serve.main([made.key, "--check", "--port", "1"]) == code
    *_, what, found = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    assert what == f"check of {made.key} (merged, fp32): 2 questions of {evaluation.key}, greedy, 8 tokens at most"
    assert found == f"chat {2 - differing} of 2 equal; all have to be"
