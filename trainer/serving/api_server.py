"""vLLM's server with OpenAI's interface, for one model: its arguments, and the environment that it reads.

Callers cannot make it load anything, run code or read the host's files: what would let them is switched off here,
whatever the environment says. The key that callers have to send is in the environment alone, which no list of processes
shows.
"""

import json
import os
import tempfile
from pathlib import Path

from conf.planner.serving.layout import SEQUENCES
from contract import json_object
from contract.served_model import DEFAULTS, ServedModel
from trainer.data.tokens import rendering, templates, tokenizer
from trainer.patches import vllm_cpu
from trainer.serving import chat_template, constraints, engine, prompts, unmerged
from trainer.startup.console import say

# Doors of vLLM's that a server for callers keeps shut: pickles between processes, its own tests, loading of adapters.
SHUT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_LOG_STATS_INTERVAL": "300",  # seconds between lines of its log
}
LOADED = {"load_format": "safetensors"}
DRAINS = 10  # seconds that answers under way have when the server is told to end
BASE = "-base"  # behind the name, asks the model without its adapter


def serve(asked: ServedModel) -> None:
    """Serve until a signal ends it."""
    engine.prepare(Path(asked.kernels), online=False)
    os.environ.update(SHUT)
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        # Imports of vLLM take seconds: what the model's folders lack is said before.
        given = arguments(asked, Path(folder), _gpus(asked))
        say(f"serve: starting vLLM on this host's {engine.device()} for {asked.model}")
        with vllm_cpu.hidden():
            import uvloop
            from vllm.entrypoints.openai.api_server import run_server
            from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            vllm_cpu.ask_in_process()
        rendering.install()
        constraints.install(tokenizer.load(Path(asked.model), asked.trust_remote_code))
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
        assert parsed  # its annotation allows None
        validate_parsed_serve_args(parsed)
        uvloop.run(run_server(parsed))


def arguments(asked: ServedModel, folder: Path, gpus: int) -> list[str]:
    """Arguments of `vllm serve`. A chat template is written to the folder."""
    served = tokenizer.load(Path(asked.model), asked.trust_remote_code)
    template = templates.from_record(json_object.read(Path(asked.data) / prompts.RECORD), served)
    found = ["--model", asked.model, "--host", asked.host, "--port", str(asked.port)]
    found += ["--served-model-name", asked.name + (BASE if asked.adapter else "")]
    found += ["--dtype", engine.DTYPE[asked.precision]]
    unpacked = engine.UNPACKED if asked.adapter and engine.is_quantised(Path(asked.model)) else LOADED
    for key, value in unpacked.items():
        found += [f"--{key.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    found += ["--generation-config", "vllm", "--override-generation-config", json.dumps(DEFAULTS)]
    found += ["--structured-outputs-config", json.dumps({"backend": constraints.BACKEND})]
    found += ["--max-model-len", str(asked.length or "auto")]
    found += ["--max-num-seqs", str(SEQUENCES), "--allowed-origins", "[]", "--disable-uvicorn-access-log"]
    found += ["--middleware", "trainer.serving.public_paths.PublicPaths", "--shutdown-timeout", str(DRAINS)]
    found += ["--quantization", engine.QUANTIZATION[asked.quantization]] if asked.quantization else []
    found += ["--tensor-parallel-size", str(gpus)] if gpus else []
    found += ["--trust-remote-code"] if asked.trust_remote_code else []
    found += ["--enforce-eager"] if vllm_cpu.is_installed() else []
    found += _adapter(asked.name, Path(asked.adapter), gpus) if asked.adapter else []
    if (text := chat_template.of(template)) is not None:
        (folder / "chat_template.jinja").write_text(text)
        found += ["--chat-template", str(folder / "chat_template.jinja")]
    if template.kind == "chat" and template.options:
        found += ["--default-chat-template-kwargs", json.dumps(template.options)]
    return found


def _adapter(name: str, folder: Path, gpus: int) -> list[str]:
    adapter = unmerged.read(folder, name)
    module = {"name": name, "path": str(folder), "is_3d_lora_weight": adapter.experts}
    found = ["--lora-modules", json.dumps(module)]
    for key, value in adapter.settings(max(1, gpus), expert_parallel=False).items():
        values = [] if value is True else [str(one) for one in value] if isinstance(value, list) else [str(value)]
        found += [f"--{key.replace('_', '-')}", *values] if value is not False else []
    return found


def _gpus(asked: ServedModel) -> int:
    """The number of GPUs that the model is cut over; 0 on a CPU."""
    if vllm_cpu.is_installed():
        return 0
    import torch

    return asked.gpus or torch.cuda.device_count()
