"""Questions of an evaluation, asked of a small HTTP server, and what is said of answers that differ."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from contract.faults import Fault
from tasks.run import artifact
from tasks.serving import questions
from tasks.store import open_store
from tests.support.exports import ROWS, evaluated, exported


@pytest.fixture
def asked(tmp_path):
    store = open_store(str(tmp_path / "store"))
    export = exported(store, "first")
    evaluation = evaluated(store, export, ["team 0", "team 1", "another"])
    data = artifact.read(store, f"prepare/{evaluation.stage.inputs['data']}")
    return [store.place(f"{made.key}/files") for made in (evaluation, data)]


@pytest.fixture
def server():
    """Answers each question with its number; keeps what it was asked, and with which key."""
    requests: list[tuple[str, str | None, dict]] = []
    codes: list[int] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"], asked))
            self.send_response(codes.pop() if codes else 200)
            self.end_headers()
            prompt = asked.get("prompt") or asked["messages"][-1]["content"]
            answer = "team" + prompt.removeprefix("ticket").rstrip(":")
            self.wfile.write(json.dumps({"choices": [{"text": answer, "message": {"content": answer}}]}).encode())

        def log_message(self, format, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1", requests, codes
        http.shutdown()


def test_each_is_asked_as_a_user_asks_as_text_and_as_a_chat(asked, server):
    url, requests, _ = server
    found = questions.ask(url, "key", "tickets", questions.of(*asked), 8, [], 1.0)
    assert not found.ok and found.asked == {"completions": 3, "chat": 3}
    assert {key for _, key, _ in requests} == {"Bearer key"}
    (way, _, text), (other, _, chat), *_ = requests
    shared = {"model": "tickets", "max_tokens": 8}  # the server's temperature and penalties
    assert (way, text) == ("/v1/completions", shared | {"prompt": ROWS[0]["input"], "add_special_tokens": False})
    messages = [{"role": "user", "content": ROWS[0]["input"]}]
    assert (other, chat) == ("/v1/chat/completions", shared | {"messages": messages})


def test_answers_that_differ_are_shown(asked, server):
    lines = questions.ask(server[0], "", "tickets", questions.of(*asked), 8, [], 1.0).lines()
    assert lines == [
        "completions 2 of 3 equal, chat 2 of 3 equal; all must be",
        "  completions: 'ticket 2:': 'team 2', in the evaluation 'another'",
        "  chat: 'ticket 2:': 'team 2', in the evaluation 'another'",
    ]


@pytest.mark.parametrize("required, ok", [(1.0, False), (0.9, False), (0.6, True)])
def test_a_share_of_each_way_has_to_be_equal(asked, server, required, ok):
    assert questions.ask(server[0], "", "tickets", questions.of(*asked), 8, [], required).ok is ok


@pytest.mark.parametrize(
    "code, said", [(401, "requires a key: set VLLM_API_KEY in the environment"), (404, "answers 404")]
)
def test_a_server_that_refuses_is_one_line(asked, server, code, said):
    url, _, codes = server
    codes.append(code)
    with pytest.raises(Fault, match=said):
        questions.ask(url, "", "tickets", questions.of(*asked), 8, [], 1.0)


def test_a_server_that_is_gone_is_one_line(asked):
    with pytest.raises(Fault, match=r"^http://127.0.0.1:1/v1/completions does not answer \(ConnectError\)$"):
        questions.ask("http://127.0.0.1:1/v1", "", "tickets", questions.of(*asked), 8, [], 1.0)


def test_conversations_are_asked_up_to_their_last_answer_and_calls_of_tools_as_text_alone(asked):
    evaluation, data = asked
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    last = {"role": "assistant", "content": "d"}
    rows = [{"messages": [*turns, last]}, {"messages": [*turns, last], "tools": [{}]}, {"messages": [last]}]
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.messages for one in questions.of(evaluation, data)] == [turns, None, None]
    assert questions.example(data) == "c"


def test_a_stop_that_is_text_is_asked_for(asked):
    _, data = asked
    assert questions.stops(data) == []
    record = json.loads((data / "template.json").read_text())
    (data / "template.json").write_text(json.dumps(record | {"stop": "###"}))
    assert questions.stops(data) == ["###"]
