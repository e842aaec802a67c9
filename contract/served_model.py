"""Description of a served model, as a file that tasks/serving writes and trainer/serve.py reads."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically

KEY = "VLLM_API_KEY"  # environment variable with the key that clients must send
# Default settings of requests: those of every evaluation, not those of the model's generation_config.json.
DEFAULTS = {"temperature": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ServedModel:
    """A model with its form, its precision and its address."""

    name: str  # of the model in requests
    model: str  # folder in Hugging Face's format: the merged model, or the base of the adapter
    data: str  # folder of the prepared data, with the template
    precision: str  # fp32 or bf16
    host: str
    port: int
    kernels: str  # folder for what vLLM compiles
    adapter: str | None = None  # folder in PEFT's format
    quantization: str | None = None  # a value of evaluate.quantization
    length: int | None = None  # tokens of a question and its answer; None: limited by memory
    gpus: int | None = None  # None: all visible GPUs of this host
    trust_remote_code: bool = False

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1), durable=False)

    @classmethod
    def read(cls, path: Path) -> "ServedModel":
        values = json_object.read(path)
        if wrong := values.keys() ^ {field.name for field in fields(cls)}:
            raise Fault(f"{path}: {', '.join(sorted(wrong))}: missing, or not a key of a served model")
        return cls(**values)
