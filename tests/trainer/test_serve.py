"""python -m trainer.serve: a tiny model served, and requests that would hold up or change what others get."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from conf.schema.data import Data
from contract.served_model import ServedModel, stamp
from tests.support import model_server
from tests.support.flow_world import free_port
from trainer.data.tokens import templates, tokenizer
from trainer.rehearsal.tiny_models import make_model

SAMPLING = {"repetition_penalty": 3.0, "temperature": 1.5, "do_sample": True, "top_p": 0.9}
NEUTRAL = {"temperature": 0, "repetition_penalty": 1, "top_p": 1, "top_k": 0, "min_p": 0}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.content == 'bomb' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server of a model whose release asks for a penalty and drawn answers."""
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "model"
    make_model("llama", model, seed=0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SAMPLING))
    record = templates.choose(Data(seq_length=64), tokenizer.load(model, False), "messages").record()
    (folder / "template.json").write_text(json.dumps(record))
    where = {"host": "127.0.0.1", "port": free_port(), "kernels": str(folder / "kernels"), "stamp": stamp(model)}
    served = ServedModel("tiny", str(model), str(folder), "fp32", **where, length=256)
    with model_server.running(served, folder) as address:
        yield f"{address}/v1"


def ask(address: str, text: str = "where is my parcel", **settings) -> httpx.Response:
    content = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{address}/chat/completions", json=content | settings, timeout=90)


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


CONSTRAINTS = {
    "choices": {"choice": [f"choice {number}" for number in range(20_000)]},
    "circular schema": {"json": {"$ref": "#"}},
    "left-recursive grammar": {"grammar": "root ::= root"},
    "nested schema": {"json": nested(400)},
}
SLOW = {
    "long pattern": {"regex": "a" * 100_000},
    "enormous length": {"json": {"type": "string", "maxLength": 10**9}},
}


def test_a_request_that_names_no_settings_is_answered_as_in_the_evaluation(address):
    """The release's penalty and temperature do not apply, as no evaluation has them."""
    for text in ("where is my parcel", "I was charged twice", "Order 1234: it is late"):
        plain, evaluated, released = (ask(address, text, **settings) for settings in ({}, NEUTRAL, SAMPLING))
        assert answer(plain) == answer(evaluated) != answer(released)


@pytest.mark.parametrize("name", [*CONSTRAINTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_constraint_is_kept_or_refused_within_seconds_while_others_are_answered(address, name):
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        refused = pool.submit(ask, address, structured_outputs=(CONSTRAINTS | SLOW)[name])
        assert ask(address).status_code == 200 and time.monotonic() - began < 20
        response = refused.result()
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert "the constraint on the answer cannot be used: " in response.json()["error"]["message"]
    assert answer(ask(address, structured_outputs={"choice": ["late", "early"]})) in ("late", "early")


@pytest.mark.slow
def test_a_template_that_hangs_on_a_message_is_answered_400(address):
    response = ask(address, "bomb")
    assert response.status_code == 400
    assert "the chat template takes more than 5 s with these messages" in response.json()["error"]["message"]
    assert ask(address).status_code == 200
