"""Arguments, environment and chat template of vLLM's OpenAI-compatible server for one model.

Callers cannot make the server load anything, run code or read the host's files: this module switches these features
off, even if the environment enables them. The key that callers must send is only in the environment, because arguments
are visible in lists of processes.
"""

import functools
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.planner.serving.layout import SEQUENCES
from contract import json_object
from contract.faults import Fault
from contract.served_model import DEFAULTS, ServedModel, stamp
from trainer.data.tokens import rendering, templates, tokenizer
from trainer.data.tokens.chat import MARK
from trainer.data.tokens.template_text import split
from trainer.data.tokens.templates import Template
from trainer.patches import vllm_cpu
from trainer.serving import adapters, constraints, engine, prompts, unmerged
from trainer.startup.console import say

LOADED = {"load_format": "safetensors"}
DRAIN_SECONDS = 10  # for unfinished answers after SIGTERM
ONE = (
    "{%- if messages|length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model was trained on single questions: send one message, of the user') }}"
    "{%- endif -%}"
)
QUESTION = "messages[0]['content']"


def serve(file: Path) -> None:
    """Serve the model that the file describes until a signal ends it. Its adapters may change meanwhile."""
    settings = ServedModel.read(file)
    if stamp(Path(settings.model)) != settings.stamp:
        raise Fault(f"{settings.model}: its files have changed since they were checked; start the server again")
    engine.prepare(Path(settings.kernels), online=False)
    os.environ.update(engine.ENVIRONMENT["server"])
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        # Imports of vLLM take seconds, so missing files of the model are reported before them.
        gpus = engine.gpus(settings.gpus)
        command = arguments(settings, Path(folder), gpus)
        say(f"serve: starting vLLM on this host's {engine.device()} for {settings.model}")
        with vllm_cpu.hidden():
            import uvloop
            from vllm.entrypoints.openai.api_server import run_server
            from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            vllm_cpu.ask_in_process()
        rendering.install()
        constraints.install(tokenizer.load(Path(settings.model), settings.trust_remote_code))
        sized = sized_by(settings) if settings.room else None
        adapters.install(file, settings.stamp, sized, max(1, gpus), functools.partial(chat, settings))
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
        assert parsed  # its annotation allows None
        validate_parsed_serve_args(parsed)
        uvloop.run(run_server(parsed))


def arguments(settings: ServedModel, folder: Path, gpus: int) -> list[str]:
    """Arguments of `vllm serve`. If it needs a chat template, that is written to the folder."""
    template, options = chat(settings, Path(settings.data))
    sized = sized_by(settings) if settings.room else None
    values: dict[str, Any] = {"model": settings.model, "host": settings.host, "port": settings.port}
    values |= {"served_model_name": settings.name}
    values |= {"dtype": engine.DTYPE[settings.precision], "trust_remote_code": settings.trust_remote_code}
    values |= engine.ALWAYS
    values |= engine.UNPACKED if sized and engine.is_unpacked(Path(settings.model)) else LOADED
    values |= {"generation_config": "vllm", "override_generation_config": DEFAULTS}
    values |= {"structured_outputs_config": {"backend": constraints.BACKEND}}
    values |= {"max_model_len": settings.length or "auto", "max_num_seqs": SEQUENCES}
    values |= {"allowed_origins": "[]", "disable_uvicorn_access_log": True, "shutdown_timeout": DRAIN_SECONDS}
    values |= {"middleware": "trainer.serving.public_paths.PublicPaths", "enforce_eager": vllm_cpu.is_installed()}
    values |= {"quantization": engine.QUANTIZATION[settings.quantization]} if settings.quantization else {}
    values |= {"tensor_parallel_size": gpus} if gpus else {}
    values |= sized.settings(max(1, gpus), False) | {"max_loras": settings.room} if sized else {}
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        values |= {"chat_template": str(folder / "chat_template.jinja")}
    values |= {"default_chat_template_kwargs": options} if options else {}
    return [word for key, value in values.items() for word in _option(key, value)]


def sized_by(settings: ServedModel) -> unmerged.Adapter:
    """The adapter with the highest rank, and all layers, of those for which the server has memory."""
    every = [unmerged.read(Path(folder), settings.name) for folder in settings.sized_by]
    rank, layers = max(adapter.rank for adapter in every), frozenset[str]().union(*(one.layers for one in every))
    return replace(every[0], rank=rank, layers=layers)


def chat(settings: ServedModel, data: Path) -> tuple[str | None, dict[str, Any]]:
    """The chat template of prepared data, if it is not the tokenizer's own, and its default options."""
    served = tokenizer.load(Path(settings.model), settings.trust_remote_code)
    template = templates.from_record(json_object.read(data / prompts.RECORD), served)
    return chat_template(template), template.options if template.kind == "chat" else {}


def _option(key: str, value: Any) -> list[str]:
    """The words of an option: its name, and its values unless it is a switch."""
    if value is False:
        return []
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return [f"--{key.replace('_', '-')}", *([] if value is True else map(str, values))]


def chat_template(template: Template) -> str | None:
    """The training's template as the server's: it turns a question in a chat into the trained prompt.

    chat     the tokenizer's own template needs nothing; a Jinja file is used unchanged
    plain    the text around {input}, for one message
    jinja    the text that a file with `input` and `output` writes before the answer, for one message

    None if the tokenizer's own chat template is used, or the data have no prompts.
    """
    if template.kind == "plain":
        before, after, _ = split(template.text)
        return f"{ONE}{{{{ {_literal(before)} + {QUESTION}.strip(' ') + {_literal(after)} }}}}"
    if template.kind == "jinja":
        variables = f"{{%- set input = {QUESTION} -%}}{{%- set output = {_literal(MARK)} -%}}"
        options = "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in template.options.items())
        whole = f"{{% set whole %}}\n{template.text}{{% endset %}}"  # transformers drops a line break after a block
        return f"{ONE}{variables}{options}{whole}{{{{- whole.split({_literal(MARK)})[0].removesuffix(' ') }}}}"
    if template.kind == "chat" and template.origin != templates.CHAT:
        return template.text
    return None


def _literal(value: object) -> str:
    """A value as a Jinja literal. Jinja accepts JSON's escapes, true and false."""
    return json.dumps(value, ensure_ascii=False)
