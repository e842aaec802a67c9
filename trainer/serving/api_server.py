"""vLLM's server with OpenAI's interface, for one model: its arguments, and the environment that it reads.

Callers cannot make it load anything, run code or read the host's files: what would let them is switched off here,
whatever the environment says. The key that callers have to send is in the environment alone, which no list of processes
shows.
"""

import json
import os
import re
import tempfile
from pathlib import Path

from contract import json_object
from contract.faults import Fault
from contract.served_model import ServedModel
from trainer.data.tokens import templates, tokenizer
from trainer.patches import vllm_cpu
from trainer.serving import chat_template, engine, prompts
from trainer.startup.console import say

# Doors of vLLM's that a server for callers keeps shut: pickles between processes, its own tests, loading of adapters.
SHUT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_LOG_STATS_INTERVAL": "300",  # seconds between lines of its log
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM sets memory aside for
DRAINS = 10  # seconds that answers under way have when the server is told to end
BASE = "-base"  # behind the name, asks the model without its adapter


def serve(asked: ServedModel) -> None:
    """Serve until a signal ends it."""
    engine.prepare(online=False)
    os.environ.update(SHUT)
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        # Imports of vLLM take seconds: what the model's folders lack is said before.
        given = arguments(asked, Path(folder))
        say(f"serve: starting vLLM on this host's {engine.device()} for {asked.model}")
        with vllm_cpu.hidden():
            import uvloop
            from vllm.entrypoints.openai.api_server import run_server
            from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            vllm_cpu.ask_in_process()
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([*given, *_gpus(asked)])
        assert parsed  # its annotation allows None
        validate_parsed_serve_args(parsed)
        uvloop.run(run_server(parsed))


def arguments(asked: ServedModel, folder: Path) -> list[str]:
    """Arguments of `vllm serve`. A chat template is written to the folder."""
    served = tokenizer.load(Path(asked.model), asked.trust_remote_code)
    template = templates.from_record(json_object.read(Path(asked.data) / prompts.RECORD), served)
    found = ["--model", asked.model, "--host", asked.host, "--port", str(asked.port)]
    found += ["--served-model-name", asked.name + (BASE if asked.adapter else "")]
    found += ["--dtype", {"fp32": "float32", "bf16": "bfloat16"}[asked.precision]]
    found += ["--load-format", "safetensors", "--max-model-len", str(asked.length or "auto")]
    found += ["--max-num-seqs", str(engine.SEQUENCES), "--allowed-origins", "[]", "--disable-uvicorn-access-log"]
    found += ["--middleware", "trainer.serving.public_paths.PublicPaths", "--shutdown-timeout", str(DRAINS)]
    found += ["--quantization", asked.quantization] if asked.quantization else []
    found += ["--trust-remote-code"] if asked.trust_remote_code else []
    found += ["--enforce-eager"] if vllm_cpu.is_installed() else []
    found += _adapter(asked) if asked.adapter else []
    if (text := chat_template.of(template)) is not None:
        (folder / "chat_template.jinja").write_text(text)
        found += ["--chat-template", str(folder / "chat_template.jinja")]
    if template.kind == "chat" and template.options:
        found += ["--default-chat-template-kwargs", json.dumps(template.options)]
    return found


def _adapter(asked: ServedModel) -> list[str]:
    assert asked.adapter
    path = Path(asked.adapter)
    config = json_object.read(path / "adapter_config.json")
    rank, of_parameters = config["r"], config.get("target_parameters") or ()
    room = next((size for size in RANKS if size >= rank), None)
    if room is None:
        raise Fault(f"{path}: its rank is {rank}, and vLLM serves up to {RANKS[-1]}; serve it merged")
    # Adapters of experts lie in the file as PEFT has them for a parameter, all experts in one tensor: "3d".
    experts = any(re.search(r"(^|\.)experts\.", name) for name in of_parameters)
    module = {"name": asked.name, "path": asked.adapter, "is_3d_lora_weight": experts}
    found = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room), "--lora-modules", json.dumps(module)]
    return found + (["--enable-mixed-moe-lora-format"] if experts else [])


def _gpus(asked: ServedModel) -> list[str]:
    if vllm_cpu.is_installed():
        return []
    import torch

    count = asked.gpus or torch.cuda.device_count()
    sharded = ["--fully-sharded-loras"] if asked.adapter and count > 1 else []  # else every GPU holds all of an adapter
    return ["--tensor-parallel-size", str(count), *sharded]
