"""Rewards by another model, over HTTP: what it says counts, and what is wrong with it is one line."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from conf.load import ConfigError, load
from contract.faults import Fault
from tests.support.reinforced import answers
from trainer.reinforcement import judge, rewards
from trainer.reinforcement.guarded.worker import Question

RIGHT, WRONG = Question("7 + 5?", "it is 12", "12"), Question("7 + 5?", "it is 13 {reference}", "12")


class StandIn(ThreadingHTTPServer):
    """A server that judges by whether the reference stands in the answer, unless `does` says otherwise."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.does: Callable[[Handler], bool] = lambda _: False  # whether it has dealt with a question by itself
        self.asked: list[dict] = []
        self.keys: list[str | None] = []

    @property
    def place(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]
    text = ""

    def do_GET(self):
        self.say({"data": [{"id": "stern"}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self.text = body["messages"][0]["content"]
        if self.server.does(self):
            return
        _, answer, reference = self.text.split("|")
        _says(self, f"I compare both.\nWorth: {float(reference in answer)}")

    def say(self, answer: dict, status: int = 200):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[StandIn]:
    monkeypatch.setattr(judge, "WAIT", 0.01)
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def make(server, tmp_path):
    """make(*overrides) -> the reward of a run that is judged by the stand-in"""
    prompt = tmp_path / "judge.txt"
    prompt.write_text("{prompt}|{answer}|{reference}")
    said = ["reinforce.reward=judge", f"reinforce.judge={server.place}", "reinforce.judge_model=stern"]
    said += [f"reinforce.judge_prompt={prompt}", "reinforce.judge_tries=3"]

    def make(*overrides: str):
        mine = {override.partition("=")[0] for override in overrides}
        return rewards.make(load("tiny-rl", [*(one for one in said if one.partition("=")[0] not in mine), *overrides]))

    return make


def line(found: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_the_judge_says_is_what_an_answer_is_worth(make, server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    assert make()([RIGHT, WRONG, RIGHT, RIGHT]) == [1.0, 0.0, 1.0, 1.0]
    assert len(server.asked) == 2  # the same answer to the same prompt is judged once
    texts = {one["messages"][0]["content"] for one in server.asked}
    assert texts == {"7 + 5?|it is 12|12", "7 + 5?|it is 13 {reference}|12"}  # an answer puts in nothing
    assert {one["model"] for one in server.asked} == {"stern"} and {one["temperature"] for one in server.asked} == {0}
    assert set(server.keys) == {"Bearer secret"}


def test_the_last_number_of_a_reply_counts_from_0_to_1():
    said = ["0.25", "of 10 points 7, so .7", "1", "1.5", "-1", "fine", ""]
    assert [judge.reward(one) for one in said] == [0.25, 0.7, 1.0, None, None, None, None]


def test_a_reply_without_a_number_is_worth_nothing_and_a_judge_without_any_ends_the_run(make, server):
    found, answers = make(), [Question("p", f"12, {number}", "12") for number in range(3)]
    server.does = lambda handler: "12, 1" in handler.text and _says(handler, "well")
    assert found(answers) == [1.0, 0.0, 1.0]
    server.does = lambda handler: _says(handler, "well")
    with pytest.raises(Fault, match=r"^reinforce.judge: stern replied to none of 3 answers with a number") as fault:
        found(answers)
    line(fault)


def _says(handler: Handler, text: str) -> bool:
    handler.say({"choices": [{"message": {"role": "assistant", "content": text}}]})
    return True


def test_a_judge_that_stumbles_is_asked_again(make, server):
    times = iter([503, 429])

    def stumble(handler: Handler) -> bool:
        if status := next(times, None):
            handler.say({"error": "busy"}, status)
        return bool(status)

    server.does = stumble
    assert make()([RIGHT]) == [1.0] and len(server.asked) == 3


def _hang_up(handler: Handler) -> bool:
    handler.close_connection = True
    return True


def _drip(handler: Handler) -> bool:
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.1)
    except OSError:  # the other side has left
        pass
    return True


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (_hang_up, "Remote end closed connection without response"),
        (_drip, r"no end within 0.5 s \(reinforce.reward_seconds\)"),
        (lambda _: time.sleep(1.5) or True, "timed out"),
        (lambda handler: handler.say({}, 500) or True, "500 Internal Server Error"),
        (lambda handler: handler.say([1]) or True, "not a JSON object"),  # type: ignore[arg-type]
    ],
)
def test_a_judge_that_is_away_ends_the_run_with_one_line_after_its_tries(does, reason, make, server):
    found, server.does = make("reinforce.reward_seconds=0.5"), does
    began = time.monotonic()
    with pytest.raises(Fault, match=rf"^reinforce.judge: http://.*: no answer in 3 tries \(.*{reason}\)") as fault:
        found([RIGHT])
    line(fault)
    assert len(server.asked) == 3 and time.monotonic() - began < 20


def test_what_another_try_would_not_change_is_not_tried_again(make, server):
    found, server.does = make(), lambda handler: handler.say({"error": "no"}, 401) or True
    with pytest.raises(Fault, match=r"^reinforce.judge: http://.*/chat/completions: 401 Unauthorized$"):
        found([RIGHT])
    assert len(server.asked) == 1
    server.does = lambda handler: handler.say({"text": "1"}) or True
    with pytest.raises(Fault, match="the reply is not a chat completion"):
        found([RIGHT])


def test_a_judge_that_is_not_there_at_all_is_told_before_anything_starts(make, tmp_path):
    with pytest.raises(Fault, match=r"no answer in 3 tries \(\[Errno 111\] Connection refused\)"):
        make("reinforce.judge=http://127.0.0.1:9/v1")
    with pytest.raises(Fault, match=r"^reinforce.judge_model: mild is not served at http://.*, which has stern$"):
        make("reinforce.judge_model=mild")
    with pytest.raises(Fault, match=r"^reinforce.judge_prompt: .*absent"):
        make(f"reinforce.judge_prompt={tmp_path}/absent")
    (tmp_path / "blind.txt").write_text("{prompt}")
    with pytest.raises(Fault, match=r"^reinforce.judge_prompt: .*has no \{answer\}"):
        make(f"reinforce.judge_prompt={tmp_path}/blind.txt")


def test_keys_of_the_judge_go_together():
    with pytest.raises(ConfigError) as found:
        load("tiny-rl", ["reinforce.reward=judge", "reinforce.judge=http://judge:8000/v1"])
    text = str(found.value)
    assert "reinforce.judge_model: required" in text and "reinforce.judge_prompt: required" in text
    with pytest.raises(ConfigError, match=r"reinforce.judge_model: has no effect with reinforce.reward exact"):
        load("tiny-rl", ["reinforce.judge_model=stern"])
    with pytest.raises(ConfigError, match=r"reinforce.judge: "):
        load("tiny-rl", ["reinforce.judge=judge:8000"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_learns_what_a_judge_says_of_its_answers(server, tmp_path, finish):
    (tmp_path / "judge.txt").write_text("{prompt}|{answer}|{reference}")
    server.does = lambda handler: _says(handler, str(float("e" in handler.text.split("|")[1])))
    keys = {"reward": "judge", "judge": server.place, "judge_model": "stern", "pattern": "null", "steps": 2}
    keys["judge_prompt"] = tmp_path / "judge.txt"
    folder = finish("judged", {f"reinforce.{key}": value for key, value in keys.items()})
    found = [rewards for _, rewards in answers(folder)]
    assert len(found) == 2 and {0.0, 1.0} == {reward for rewards in found for reward in rewards}
    assert len(server.asked) <= sum(map(len, found))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([1], "no answer in 3 tries (not a JSON object)"),
        ({"data": None}, "the reply is not a list of models"),
        ({"data": ["stern"]}, "the reply is not a list of models"),
        ({}, "the reply is not a list of models"),
    ],
)
def test_a_server_of_something_else_is_one_line(said, reason, make, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.say(said))
    with pytest.raises(Fault, match=rf"^reinforce.judge: http://.*/models: {re.escape(reason)}") as fault:
        make()
    line(fault)


def test_names_of_models_that_fill_a_page_are_a_line(make, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.say({"data": [{"id": "a\r\nb\x1b"}] * 1000}))
    with pytest.raises(
        Fault, match=r"^reinforce.judge_model: stern is not served at http://.*, which has a b , a b"
    ) as fault:
        make()
    assert len(line(fault)) < 500 and str(fault.value).isprintable()


def test_brackets_without_end_are_one_line(make, server):
    def nest(handler: Handler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"[" * 200_000)
        return True

    found, server.does = make(), nest
    with pytest.raises(Fault, match=r"no answer in 3 tries \(brackets are nested too deeply\)") as fault:
        found([RIGHT])
    line(fault)


def test_the_key_goes_to_no_other_place_and_into_no_line(make, server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret\n")  # as a file has it
    found = make()
    assert found([RIGHT]) == [1.0] and server.keys == ["Bearer secret"]

    def away(handler: Handler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", f"{server.place}/elsewhere")
        handler.end_headers()
        return True

    server.does = away
    with pytest.raises(Fault, match=r"^reinforce.judge: http://.*/chat/completions: 302 Found$"):
        found([RIGHT])
    assert len(server.asked) == 2
    monkeypatch.setenv("JUDGE_API_KEY", "sec\nret")
    with pytest.raises(Fault, match=r"^JUDGE_API_KEY: has a character that is not allowed in an HTTP header$"):
        make()


def test_a_server_that_speaks_no_http_is_one_line(tmp_path):
    (tmp_path / "judge.txt").write_text("{answer}")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as other:
                        other.recv(1 << 12)
                        other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=speak, daemon=True).start()
        keys = {"judge": f"http://127.0.0.1:{server.getsockname()[1]}/v1", "judge_model": "stern", "judge_tries": 1}
        keys |= {"reward": "judge", "judge_prompt": tmp_path / "judge.txt"}
        run = load("tiny-rl", [f"reinforce.{key}={value}" for key, value in keys.items()])
        with pytest.raises(
            Fault, match=r"^reinforce.judge: .*/v1/models: no answer in 1 tries \(SSH-2.0-OpenSSH_9.2"
        ) as fault:
            judge.Judge(run)
        line(fault)
