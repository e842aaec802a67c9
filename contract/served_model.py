"""Description of a served model, as a file that tasks/serving writes and trainer/serve.py reads."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from contract import checksums, json_object
from contract.faults import Fault
from contract.files import write_atomically

KEY = "VLLM_API_KEY"  # environment variable with the key that clients must send
# Default settings of requests: those of every evaluation, not those of the model's generation_config.json.
DEFAULTS = {"temperature": 0.0, "repetition_penalty": 1.0}
ADAPTERS = "/v1/adapters"  # a POST makes the server load and remove adapters as its file says


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter of a served base."""

    names: list[str]  # in requests; the first names the version and never moves to another
    folder: str  # in PEFT's format
    data: str  # folder of the prepared data, with the template


@dataclass(frozen=True)
class ServedModel:
    """A model with its form, its precision and its address."""

    name: str  # of the model in requests
    model: str  # folder in Hugging Face's format: the merged model, or the base of the adapters
    data: str  # folder of the prepared data, with the template
    precision: str  # fp32 or bf16
    host: str
    port: int
    kernels: str  # folder for what vLLM compiles
    stamp: str  # of the model's files when they were compared with their record
    room: int = 0  # adapters in memory at the same time; 0: the model is merged
    adapters: list[ServedAdapter] = field(default_factory=list)
    sized_by: list[str] = field(default_factory=list)  # folders of adapters for whose ranks and layers there is memory
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
        values["adapters"] = [ServedAdapter(**adapter) for adapter in values["adapters"]]
        return cls(**values)


def stamp(model: Path) -> str:
    """Checksum of the files' names, sizes, inodes and times: it changes if a file is replaced, without reading it."""
    states = {path.name: path.stat() for path in sorted(model.iterdir())}
    return checksums.of_json({name: [s.st_ino, s.st_size, s.st_mtime_ns] for name, s in states.items()})[:16]
