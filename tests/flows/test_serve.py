"""python -m flows.serve: what it says and refuses, in this process; and, slow, a model served and asked."""

import json
import logging
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

from contract.served_model import KEY
from flows import serve
from tasks.serving import adapters, questions, server
from tasks.store import open_store
from tests.support.exports import ROWS, evaluated, exported
from tests.support.flow_world import CONF, MARKER, ROOT, World, free_port

READY = 280.0  # seconds, on a busy machine


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
        "messages": [{"role": "user", "content": ROWS[0]["input"]}],
    }
    assert 'OpenAI(base_url="http://127.0.0.1:8123/v1", api_key="none")' in said and "Authorization" not in said


def test_the_printed_request_and_the_settings_that_apply_are_those_of_the_evaluation(made, answers, capsys):
    store = serve.open_run_store()
    evaluated(store, made, [])
    release = store.place(f"{made.key}/files/merged")
    assert release
    (release / "generation_config.json").write_text('{"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 1.0}')
    assert serve.main([made.key, "--port", "8123"]) == 0
    said = capsys.readouterr().out
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("-d ")]
    asked = json.loads(line.removeprefix("-d '").removesuffix("'"))
    assert asked.keys() == {"model", "max_tokens", "messages"} and asked["max_tokens"] == 8
    assert (
        "requests that name no settings are answered as in the evaluation: temperature 0, repetition_penalty 1; "
        "generation_config.json of the release has temperature 0.7, repetition_penalty 1.1, which a request can name"
    ) in said


def test_the_key_is_named_and_never_shown(made, answers, capsys, monkeypatch):
    monkeypatch.setenv(KEY, "s3cr3t-marker")
    assert serve.main([made.key, "--host", "0.0.0.0"]) == 0
    said = capsys.readouterr().out
    assert f'"Authorization: Bearer ${KEY}"' in said and f'os.environ["{KEY}"]' in said and "s3cr3t" not in said


def test_the_form_with_an_adapter_is_said(made, answers, capsys):
    assert serve.main([made.key, "--adapter"]) == 0
    assert "(base and adapter, bf16)" in capsys.readouterr().out
    assert answers[0].adapters[0].folder.endswith("files/adapter")


def test_adapters_of_one_base_are_served_together_and_another_base_is_refused(made, answers, capsys):
    store = serve.open_run_store()
    second, other = exported(store, "second", adapter={}), exported(store, "other", adapter={}, trust=True)
    assert serve.main([made.key, second.key, "--adapters", "3"]) == 0
    (served,) = answers
    assert (served.room, len(served.sized_by), served.name) == (3, 2, f"{made.key.replace('/', '-')}-base")
    assert [one.names for one in served.adapters] == [[key.replace("/", "-")] for key in (made.key, second.key)]
    assert f"serving {made.key}, {second.key} (base and adapter, bf16)" in capsys.readouterr().out
    assert serve.main([made.key, other.key]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {other.key}: needs model ") and "but the server has /" in said


def test_adapters_are_loaded_into_the_running_server_after_a_comparison_of_the_base(made, answers, capsys, monkeypatch):
    store, changes = serve.open_run_store(), []
    second, other = exported(store, "second", adapter={}), exported(store, "other", adapter={}, trust=True)
    dora = exported(store, "dora", adapter={"use_dora": True})
    assert serve.main([made.key, "--adapters", "2"]) == 0
    monkeypatch.setattr(adapters, "running", lambda folder, port: answers[0])
    monkeypatch.setattr(adapters, "change", lambda served, changed, folder: changes.append(changed))
    assert serve.main(["load", second.key]) == serve.main(["unload", made.key]) == 0
    assert [len(changed.adapters) for changed in changes] == [2, 0]
    assert f"{second.key.replace('/', '-')}: /" in capsys.readouterr().out
    file = Path(answers[0].model) / "config.json"
    for refused, reason in (
        (other, "needs model "),
        (second, "its files have changed since the server loaded"),
        (dora, "vLLM adds products, and DoRA scales the weight"),
    ):
        if refused is second:  # the same bytes, written later
            file.write_bytes(file.read_bytes())
        assert serve.main(["load", refused.key]) == 2
        assert reason in capsys.readouterr().err and len(changes) == 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nothing"], "error: nothing: neither a model in the registry at sqlite:///"),
        (["export/ffff"], "error: export/ffff: matches 0 exports"),
        (["tickets@"], "error: tickets@: a version or an alias must follow the @"),
        (["nothing", "--port", "0"], "error: --port: 0 is not a port, from 1 to 65535"),
        (["nothing", "--port", "99999"], "error: --port: 99999 is not a port, from 1 to 65535"),
        (
            ["nothing", "--length", "0"],
            "error: --length: 0 is too small for a question and an answer; it must be at least 2",
        ),
        (["nothing", "--host", "0.0.0.0"], "error: --host 0.0.0.0: other hosts can connect without a key"),
    ],
)
def test_a_refusal_is_one_line(made, answers, capsys, arguments, said):
    assert serve.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(said) and shown.err.count("\n") == 1 and not answers


def test_a_folder_that_cannot_be_written_is_one_line(made, tmp_path, capsys, monkeypatch):
    (tmp_path / "serve").touch()
    assert serve.main([made.key, "--port", "8123"]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: {tmp_path}/serve/8123: Not a directory\n"
    monkeypatch.setattr(serve, "get_run_logger", lambda: logging.getLogger("toy"))
    state = serve.serve.fn(made.key, port=8123)
    assert state.is_failed() and state.message == f"{tmp_path}/serve/8123: Not a directory"


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
    assert found == f"chat {2 - differing} of 2 equal; all must be"


class Served:
    """A server that was started by the command line, with a key that callers have to send."""

    def __init__(self, place: World, *arguments: str):
        self.port = free_port()
        command = [sys.executable, "-m", "flows.serve", *arguments, "--port", str(self.port)]
        self.environment = place.environment | {KEY: MARKER}
        self.log = place.folder / f"serve-{self.port}.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)
        until = time.monotonic() + READY
        while "; ask:" not in self.said() and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        assert "; ask:" in self.said(), self.said()

    def said(self) -> str:
        return self.log.read_text()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=READY)

    def printed(self) -> tuple[str, str]:
        """The commands that it has printed: for a shell, and for Python."""
        _, shell, python = self.said().partition("; ask:")[2].split("\n\n")[:3]
        return textwrap.dedent(shell), textwrap.dedent(python)


@pytest.fixture
def start(place):
    started: list[Served] = []

    def start(*arguments: str) -> Served:
        started.append(Served(place, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.terminate()
        one.process.wait(60)


@pytest.fixture(scope="module")
def dense(place) -> None:
    """A model without experts, whose adapter a CPU can serve beside the base."""
    text = CONF.replace("name: quick", "name: dense").replace("tiny://glm4-moe", "tiny://llama")
    (place.folder / "dense.yaml").write_text(text)
    command = [sys.executable, "-m", "flows.finetune", str(place.folder / "dense.yaml")]
    subprocess.run(command, cwd=ROOT, env=place.environment, check=True, timeout=600, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_champion_answers_curl_and_openais_client_as_in_its_evaluation(place, first, start):
    """All from S3 and MLflow's server. Callers without the key get nothing; ended, it leaves nothing."""
    server = start("quick")
    shell, python = server.printed()
    curl = server.run("sh", "-c", shell)
    answer = json.loads(curl.stdout)["choices"][0]["message"]["content"]
    client = server.run(sys.executable, "-c", python)
    assert client.stdout.rstrip("\n") == answer and answer, client.stderr
    check = server.run(sys.executable, "-m", "flows.serve", "quick", "--check", "--port", str(server.port))
    assert check.returncode == 0, check.stdout + check.stderr
    assert "completions 20 of 20 equal, chat 20 of 20 equal; all must be" in check.stdout
    address = f"http://127.0.0.1:{server.port}"
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert [httpx.post(f"{address}/{path}", json={}).status_code for path in ("invocations", "tokenize")] == [404, 404]
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children and not any(MARKER in " ".join(child.cmdline()) for child in children)
    server.process.terminate()
    assert server.process.wait(30) == 0 and server.said().endswith("stopped\n")
    assert not any(child.is_running() for child in children)
    kept = place.folder / f"runs/serve/{server.port}"
    assert MARKER not in server.said() + (kept / "server.log").read_text() + (kept / "model.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_adapter_beside_its_base_answers_as_the_merged_model(dense, start):
    """Loaded again by the command, it keeps its names; the merged model is not taken for it."""
    server = start("dense", "--adapters", "2")
    assert "serving dense version 1 (base and adapter, fp32)" in server.said()
    command = (sys.executable, "-m", "flows.serve")
    port = ("--port", str(server.port))
    loaded = server.run(*command, "load", "dense", *port)
    assert loaded.returncode == 0 and "dense@1 and dense: /" in loaded.stdout, loaded.stderr
    check = server.run(*command, "dense@1", "--adapter", "--check", *port)
    assert check.returncode == 0, check.stdout + check.stderr
    assert "completions 20 of 20 equal, chat 20 of 20 equal; all must be" in check.stdout
    merged = server.run(*command, "dense", "--check", *port)
    assert merged.returncode == 2 and "--port names another" in merged.stderr
    unloaded = server.run(*command, "unload", "dense@1", *port)
    assert unloaded.returncode == 0 and "dense@1" not in unloaded.stdout and "dense-base: /" in unloaded.stdout


@pytest.fixture(scope="module")
def packed(place) -> None:
    """Two models on the same packed base, of two rates."""
    keys = "model.base=int4 convert.to=packed evaluate.adapter=packed train.precision=bf16 export.formats=[adapter]"
    for name, rate in ("packed", "5e-3"), ("other", "2e-3"):
        text = CONF.replace("name: quick", f"name: {name}").replace("tiny://glm4-moe", "tiny://qwen3")
        (place.folder / f"{name}.yaml").write_text(text)
        command = [sys.executable, "-m", "flows.finetune", str(place.folder / f"{name}.yaml"), *keys.split()]
        command.append(f"optimizer.lr={rate}")
        subprocess.run(command, cwd=ROOT, env=place.environment, check=True, timeout=900, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_versions_of_two_models_on_one_packed_base_are_loaded_and_answer_as_evaluated(packed, start):
    server = start("packed@1", "--adapters", "2")  # a packed version needs no other option
    assert "serving packed version 1 (packed base and adapter, bf16)" in server.said()
    command, port = (sys.executable, "-m", "flows.serve"), ("--port", str(server.port))
    early = server.run(*command, "other@1", "--adapter", "--check", *port)
    assert early.returncode == 2 and "not other@1 (" in early.stderr
    loaded = server.run(*command, "load", "other@1", *port)
    assert loaded.returncode == 0 and "other@1 and other: /" in loaded.stdout, loaded.stderr
    check = server.run(*command, "packed@1", "other@1", "--check", *port)
    assert check.returncode == 0, check.stdout + check.stderr
    assert check.stdout.count("90% must be") == 2
