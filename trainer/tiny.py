"""Make tiny random checkpoints and data, with which every step from import to serving runs in seconds on a CPU.

    python -m trainer.tiny KIND OUT [--seed N] [--dtype bfloat16|float32]
    python -m trainer.tiny data OUT [--rows N] [--seed N]

KIND is one of KINDS, or quantised: llama-fp8; OF_TINY of conf/model_files/quantization.py has the formats. OUT becomes
a Hugging Face checkpoint folder: configuration, two safetensors shards, a byte-level tokenizer and a chat template.
With `data` it gets training.jsonl and validation.jsonl, the input/output pairs for Megatron-Bridge's supervised
fine-tuning. Equal arguments give equal bytes, and OUT appears only when it is complete.
"""

from pathlib import Path

from conf.model_files import quantization
from contract import closed_pipe
from contract.faults import named
from trainer.rehearsal.tiny_models import KINDS, make_data, make_model
from trainer.startup import entry, full_disk


def main() -> int:
    parser = entry.parser("trainer.tiny", __doc__)
    commands = parser.add_subparsers(dest="kind", required=True)
    for kind in [*KINDS, *(f"{kind}-{form}" for kind in KINDS for form in quantization.OF_TINY), "data"]:
        command = commands.add_parser(kind)
        command.add_argument("out", type=Path)
        command.add_argument("--seed", type=int, default=0)
        if kind == "data":
            command.add_argument("--rows", type=int, default=512)
        else:
            command.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = vars(parser.parse_args())
    if options.get("rows", 1) < 1:
        parser.error(f"--rows: {options['rows']} is not a positive number of rows")
    kind, out = options.pop("kind"), options.pop("out")
    with entry.faults_in_one_line(), full_disk.named(out), named(out, OSError):
        make_data(out, **options) if kind == "data" else make_model(kind, out, **options)
    return 0


if __name__ == "__main__":
    closed_pipe.run(main)
