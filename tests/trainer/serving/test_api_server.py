"""Arguments of vLLM's server, chat templates made of a training's, and the paths that callers reach."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors.torch import save_file
from transformers.utils.chat_template_utils import render_jinja_template

from conf.schema.data import Data
from contract.faults import Fault
from contract.served_model import ServedModel, stamp
from tests.support import data_folders
from trainer.data.tokens import templates, tokenizer
from trainer.serving import api_server
from trainer.serving.api_server import chat_template
from trainer.serving.public_paths import PublicPaths

QUESTION = '  17 + 25? "{{ messages }}" \\n {input} \U0001f600'
ANSWER = "It is 42."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return data_folders.make(tmp_path_factory.mktemp("model") / "chatml", "chatml")


def template(model: Path, kind: str = "pairs", **data):
    return templates.choose(Data(**{"seq_length": 512, **data}), tokenizer.load(model, False), kind)


def rendered(text: str, messages: list[dict], **variables) -> str:
    return render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **variables)[0][0]


PLAIN = ("{input} {output}", "Q: {input}\nA:{output}", '"{input}" \\ it\'s\n\n {output}')
JINJA = (
    "### {{ input }}\n### {{ output }}<|im_end|>",
    "{% if brief %}Briefly: {% endif %}{{ input }} -> {{ output }}!\n",
)


@pytest.mark.parametrize("text", PLAIN)
def test_a_question_in_a_chat_is_the_prompt_of_a_plain_template(model, text):
    trained = template(model, template=text)
    served = rendered(chat_template(trained), [{"role": "user", "content": QUESTION}])
    assert served == trained.prompt({"input": QUESTION, "output": ANSWER})


@pytest.mark.parametrize("text", JINJA)
def test_a_question_in_a_chat_is_the_prompt_of_a_file_with_input_and_output(model, text, tmp_path):
    (tmp_path / "own.jinja").write_text(text)
    trained = template(model, template=str(tmp_path / "own.jinja"), template_options={"brief": True})
    assert trained.kind == "jinja"
    served = rendered(chat_template(trained), [{"role": "user", "content": QUESTION}])
    assert served == trained.prompt({"input": QUESTION, "output": ANSWER})


@pytest.mark.parametrize("roles", [[], ["system", "user"], ["user", "assistant", "user"]])
def test_a_model_of_single_questions_takes_no_conversation(model, roles):
    text = chat_template(template(model, template=PLAIN[0]))
    with pytest.raises(TemplateError, match="trained on single questions"):
        rendered(text, [{"role": role, "content": "x"} for role in roles])


def test_a_file_for_messages_is_taken_as_it_is_and_the_tokenizers_own_needs_nothing(model, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert chat_template(template(model, "messages", template=str(tmp_path / "own.jinja"))).startswith("{% for")
    assert chat_template(template(model, "messages")) is None


@pytest.fixture
def served(model, tmp_path):
    """served(...) -> the arguments, by name"""

    def served(made=None, gpus=0, **changed) -> dict[str, str]:
        (tmp_path / "data").mkdir()
        (tmp_path / "data/template.json").write_text(json.dumps((made or template(model, "messages")).record()))
        given = {"name": "tickets", "model": str(model), "data": str(tmp_path / "data"), "precision": "bf16"}
        asked = ServedModel(**given | {"host": "127.0.0.1", "port": 8000, "kernels": "k", "stamp": "s"} | changed)
        found = api_server.arguments(asked, tmp_path, gpus)
        places = [place for place, word in enumerate(found) if word.startswith("--")] + [len(found)]
        return {found[one]: " ".join(found[one + 1 : two]) for one, two in itertools.pairwise(places)}

    return served


def test_it_is_served_as_it_was_asked_for(served):
    found = served(length=4096, quantization="fp8", gpus=4)
    assert {"--served-model-name": "tickets", "--dtype": "bfloat16", "--max-model-len": "4096"}.items() <= found.items()
    assert (found["--quantization"], found["--tensor-parallel-size"]) == (
        "fp8_per_channel",
        "4",
    ) and "--enable-lora" not in found


def test_nothing_but_safetensors_and_no_code_of_the_model_unless_it_was_allowed(served):
    found = served()
    assert found["--load-format"] == "safetensors" and "--trust-remote-code" not in found
    assert not {"--api-key", "--trust-request-chat-template"} & found.keys()


def test_a_model_whose_files_changed_after_the_comparison_with_their_record_is_not_served(model, tmp_path):
    settings = ServedModel("tickets", str(model), "d", "fp32", "127.0.0.1", 8000, "k", stamp(model))
    settings.write(tmp_path / "model.json")
    (model / "config.json").write_text("{ }")
    with pytest.raises(Fault, match="its files have changed since they were checked; start the server again"):
        api_server.serve(tmp_path / "model.json")


def test_a_request_that_names_no_settings_has_those_of_the_evaluation(served):
    found = served()
    assert found["--generation-config"] == "vllm"
    assert json.loads(found["--override-generation-config"]) == {"temperature": 0, "repetition_penalty": 1}


def test_the_template_of_the_training_and_its_options_are_the_servers(served, model, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    text = {"template": str(tmp_path / "own.jinja"), "template_options": {"enable_thinking": False}}
    found = served(template(model, "messages", **text))
    assert Path(found["--chat-template"]).read_text().startswith("{% for")
    assert json.loads(found["--default-chat-template-kwargs"]) == {"enable_thinking": False}


def test_another_tokenizer_than_that_of_the_training_is_refused(served, model, tmp_path):
    other = template(data_folders.make(tmp_path / "glm", "glm"), "messages")
    with pytest.raises(Fault, match=r"tokenizer.json is not the file with which the data were prepared"):
        served(other)


def test_a_quantised_base_is_unpacked_beneath_its_adapter(served, model, tmp_path):
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    save_file({"layers.0.up_proj.lora_A.weight": torch.zeros(8, 4)}, tmp_path / "adapter_model.safetensors")
    found = served(room=1, sized_by=[str(tmp_path)])
    assert (found["--load-format"], found["--hf-overrides"]) == ("unpacked", '{"quantization_config": null}')


@pytest.mark.parametrize("experts", [False, True])
def test_memory_is_set_aside_for_the_largest_adapter_and_for_all_layers(served, model, tmp_path, experts):
    (model / "config.json").write_text("{}")
    for name, layer, rank in ("one", "mlp.experts" if experts else "mlp.up_proj", 4), ("two", "self_attn.q_proj", 20):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        weights = {f"base_model.model.model.layers.0.{layer}.lora_A.weight": torch.zeros(rank, 4)}
        save_file(weights, tmp_path / name / "adapter_model.safetensors")
    found = served(name="tickets-base", room=3, sized_by=[f"{tmp_path}/one", f"{tmp_path}/two"], gpus=2)
    assert (found["--served-model-name"], found["--max-lora-rank"], found["--max-loras"]) == ("tickets-base", "32", "3")
    assert found["--lora-target-modules"] == ("experts q_proj" if experts else "q_proj up_proj")
    assert {"--enable-mixed-moe-lora-format" in found, "--fully-sharded-loras" in found} == {experts}
    assert "--lora-modules" not in found


@pytest.mark.parametrize(
    "path, passes",
    [
        ("/v1/models", True),
        ("/health", True),
        ("/metrics", True),
        ("/invocations", False),
        ("/tokenize", False),
        ("/v1", False),
        ("/scale_elastic_ep", False),
        ("/docs", False),
        ("//v1/models", False),
    ],
)
def test_callers_reach_what_the_key_guards_and_the_servers_health(path, passes):
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message.get("status"))

    async def receive():
        return {}

    asyncio.run(PublicPaths(app)({"type": "http", "path": path}, receive, send))
    assert (bool(reached), 404 in sent) == (passes, not passes)
