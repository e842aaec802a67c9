"""Adapters of one base in a running server: loaded, replaced and removed, each answering for itself, or refused.

vLLM's own server, on a CPU; the adapters have drawn numbers, large enough to change every answer.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema.data import Data
from contract.faults import Fault
from contract.served_model import ServedAdapter, ServedModel, stamp
from tasks.serving import adapters
from tests.support import model_server
from tests.support.flow_world import free_port
from trainer.data.tokens import templates, tokenizer
from trainer.rehearsal.tiny_models import make_model

TARGETS = ("q_proj", "v_proj", "down_proj")
PROMPT = "where is my parcel, it was sent a week ago and nobody knows where it is now; please answer: "
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def drawn(model: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter with drawn numbers in all layers of the model."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for file in model.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in TARGETS:
                for part, shape in ("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank)):
                    drawn = torch.randn(shape, generator=random) * 0.3
                    tensors[f"base_model.model.{module}.lora_{part}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*TARGETS], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_model("llama", folder / "model", seed=0)
    for name, text in ("chat", None), ("questions", "Question: {input}\nAnswer:{output}"):
        data = Data(seq_length=64) if text is None else Data(seq_length=64, template=text)
        chosen = templates.choose(data, tokenizer.load(folder / "model", False), "pairs" if text else "messages")
        (folder / name).mkdir()
        (folder / name / "template.json").write_text(json.dumps(chosen.record()))
    for number, name in enumerate(("one", "two", "three")):
        drawn(folder / "model", folder / name, number)
    return folder


def adapter(place: Path, folder: str, *names: str, data: str = "chat") -> ServedAdapter:
    return ServedAdapter([*names], str(place / folder), str(place / data))


@pytest.fixture(scope="module")
def server(place):
    """A server of the base with one as tickets@1 and two as tickets@2; also the description of it."""
    first = [adapter(place, "one", "tickets@1", "tickets"), adapter(place, "two", "tickets@2", data="questions")]
    where = {"host": "127.0.0.1", "port": free_port(), "kernels": str(place / "kernels")}
    served = ServedModel(
        "tickets-base",
        str(place / "model"),
        str(place / "chat"),
        "fp32",
        **where,
        stamp=stamp(place / "model"),
        room=3,
        adapters=first,
        sized_by=[one.folder for one in first],
        length=256,
    )
    with model_server.running(served, place):
        yield served


@pytest.fixture
def load(server, place):
    """load(*adapters) -> the server has these as well; afterwards it has its first ones again."""

    def load(*new: ServedAdapter) -> ServedModel:
        current = ServedModel.read(place / "model.json")
        wanted = current.adapters
        for one in new:
            wanted = adapters.placed(wanted, one, moves=False)
        changed = replace(current, adapters=wanted)
        adapters.change(current, changed, place)
        return changed

    yield load
    adapters.change(ServedModel.read(place / "model.json"), server, place)


def ask(server: ServedModel, model: str, prompt: str = PROMPT, **content) -> dict:
    address = f"http://{server.host}:{server.port}/v1/{'chat/' if 'messages' in content else ''}completions"
    content = {"model": model, "max_tokens": 8} | ({"prompt": prompt} if "messages" not in content else {}) | content
    answer = httpx.post(address, json=content, timeout=90)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: ServedModel, model: str, prompt: str = PROMPT) -> tuple[str, list[float]]:
    """An answer, and the log-probabilities of its tokens."""
    choice = ask(server, model, prompt, logprobs=1)["choices"][0]
    return choice["text"], [round(value, 3) for value in choice["logprobs"]["token_logprobs"]]


def test_each_version_answers_for_itself_alone_and_among_others(server):
    alone = {name: said(server, name) for name in ("tickets@1", "tickets@2", "tickets-base")}
    assert len({str(answer) for answer in alone.values()}) == 3
    assert said(server, "tickets") == alone["tickets@1"] and ask(server, "tickets")["model"] == "tickets@1"
    names = [*alone] * 16
    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(lambda name: said(server, name, PROMPT), names)
    assert [answer[0] for answer in answers] == [alone[name][0] for name in names]


def test_a_chat_has_the_template_of_its_own_training(server):
    messages = [{"role": "user", "content": "where is it?"}]
    chat = ask(server, "tickets@2", messages=messages)
    prompt = ask(server, "tickets@2", "Question: where is it?\nAnswer:", add_special_tokens=False)
    assert chat["usage"] == prompt["usage"] and chat["choices"][0]["message"]["content"] == prompt["choices"][0]["text"]
    assert ask(server, "tickets@1", messages=messages)["usage"]["prompt_tokens"] != chat["usage"]["prompt_tokens"]


def test_a_version_is_loaded_and_unloaded_while_others_answer(server, load, place):
    before = said(server, "tickets@1")
    with_three = load(adapter(place, "three", "tickets@3"))
    assert said(server, "tickets@3") != before == said(server, "tickets@1")
    adapters.change(with_three, adapters.without(with_three, "tickets@3"), place)
    answer = httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json={"model": "tickets@3", "prompt": "x"})
    assert answer.status_code == 404 and said(server, "tickets@1") == before


def test_another_adapter_under_a_known_name_gets_no_keys_and_values_of_the_former(server, load, place):
    """vLLM stores them by the name, in blocks of 128 tokens on a CPU."""
    prompt = PROMPT * 3
    assert 128 < ask(server, "tickets", prompt)["usage"]["prompt_tokens"] < 240
    load(adapter(place, "three", "letters@1"))
    former = said(server, "letters@1", prompt)
    load(adapter(place, "two", "letters@1"))
    assert said(server, "letters@1", prompt) == said(server, "tickets@2", prompt) != former
    load(adapter(place, "three", "letters@1"))
    assert said(server, "letters@1", prompt) == former


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("layer", "layer 1 has no adapter of mlp.down_proj, which adapter_config.json announces"),
        ("rank", "rank 16, but the server has memory for 8"),
        ("module", "adapts o_proj, but the server has memory for down_proj, q_proj, v_proj"),
        ("dora", "vLLM adds products, and DoRA scales the weight"),
        ("shape", "vLLM refuses it: "),
    ],
)
def test_an_adapter_that_would_be_served_wrongly_is_refused_and_nothing_changes(
    server, load, place, tmp_path, fault, reason
):
    before = said(server, "tickets@1")
    folder = drawn(place / "model", tmp_path / "adapter", 5, rank=16 if fault == "rank" else 4)
    tensors = load_file(folder / "adapter_model.safetensors")
    if fault == "layer":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.down_proj" not in name}
    if fault == "module":
        tensors = {name.replace("q_proj", "o_proj"): tensor for name, tensor in tensors.items()}
    if fault == "shape":
        tensors = {name: torch.cat([t, t], 1) if "q_proj.lora_A" in name else t for name, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    changes = {"dora": {"use_dora": True}, "module": {"target_modules": ["o_proj", "v_proj", "down_proj"]}}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes.get(fault, {})))
    with pytest.raises(Fault) as refused:
        load(ServedAdapter(["tickets@9"], str(folder), str(place / "chat")))
    assert reason in str(refused.value), refused.value
    assert ServedModel.read(place / "model.json") == server and adapters.is_served(server)
    assert said(server, "tickets@1") == before


def test_callers_choose_nothing_that_is_loaded(server, place):
    address = f"http://127.0.0.1:{server.port}"
    wanted = {"lora_name": "own", "lora_path": str(place / "three")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/adapters"):
        assert httpx.post(f"{address}{path}", json=wanted).status_code == 404
    assert httpx.post(f"{address}/v1/adapters", json=wanted).json() == {}
    models = {card["id"] for card in httpx.get(f"{address}/v1/models").json()["data"]}
    assert models == {"tickets-base", "tickets@1", "tickets", "tickets@2"}


def test_a_base_that_was_replaced_or_another_one_behind_the_address_is_found(server, place, tmp_path):
    other = replace(server, model=str(tmp_path / "model"))
    with pytest.raises(Fault, match=r"not the base .*/model; --port names another"):
        adapters.is_served(other)
    with pytest.raises(Fault, match=r"not tickets@1 \(/elsewhere\); --port names another"):
        adapters.is_served(replace(server, adapters=[ServedAdapter(["tickets@1"], "/elsewhere", "")]))
    with pytest.raises(Fault, match="have changed since it loaded them"):
        adapters.is_served(replace(server, stamp="0" * 16))
    shutil.copytree(place / "model", other.model)
    before = stamp(Path(other.model))
    file = Path(other.model) / "config.json"
    shutil.copyfile(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    assert stamp(Path(other.model)) != before
