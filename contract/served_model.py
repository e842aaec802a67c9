"""A model that is to be served, as a file: tasks/serving writes it, trainer/serve.py reads it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically

KEY = "VLLM_API_KEY"  # the variable of the environment with the key that callers have to send
# Settings of a request that names none: those of every evaluation, not those of the model's generation_config.json.
DEFAULTS = {"temperature": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ServedModel:
    """A model with its form, its precision and the address that it is served at."""

    name: str  # that callers ask for
    model: str  # folder in Hugging Face's format: the merged model, or the base of the adapter
    data: str  # folder of the prepared data, with the template
    precision: str  # fp32 or bf16
    host: str
    port: int
    kernels: str  # folder for what vLLM compiles
    adapter: str | None = None  # folder in PEFT's format
    quantization: str | None = None  # as evaluate.quantization has it
    length: int | None = None  # tokens of a question and its answer; None: as many as memory holds
    gpus: int | None = None  # None: all that this host's environment leaves
    trust_remote_code: bool = False

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1), durable=False)

    @classmethod
    def read(cls, path: Path) -> "ServedModel":
        found = json_object.read(path)
        if unknown := found.keys() ^ {field.name for field in fields(cls)}:
            raise Fault(f"{path}: {', '.join(sorted(unknown))}: missing, or no key of a served model")
        return cls(**found)
