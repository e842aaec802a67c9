"""Write a checkpoint of another stack, or a release with a merged adapter, as a model in Hugging Face's format.

    python -m trainer.weights.adopted SOURCE OUT [--adapter FOLDER]

SOURCE has config.json, a tokenizer, and weights: safetensors, pickles (read with weights_only), a folder of torch's
distributed checkpoints (FSDP), or one of Megatron's torch_dist (Megatron-LM, Megatron-Bridge, NeMo 2). --adapter names
a LoRA or DoRA in PEFT's format. OUT appears only when it is complete. Every tensor of both must have its place.
"""

from pathlib import Path

from contract import closed_pipe
from contract.faults import Fault
from trainer.startup import entry
from trainer.startup.console import say


def main() -> int:
    parser = entry.parser("trainer.weights.adopted", __doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of the checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder for the model")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="adapter to merge")
    options = parser.parse_args()
    with entry.faults_in_one_line():
        try:
            _adopt(options.source, options.adapter, options.out)
        except OSError as error:
            raise Fault(f"{error.filename or options.out}: {error.strerror or error}") from None
    return 0


def _adopt(source: Path, adapter: Path | None, out: Path) -> None:
    from trainer.weights.adopted import checkpoints, files, merged

    kind, tensors = checkpoints.read(source)
    if adapter:
        tensors = merged.tensors(source, adapter, tensors)
    files.write(source, tensors, out)
    say(f"adopt: {out} holds {len(tensors)} tensors of {kind}{f', merged with {adapter}' if adapter else ''}")


if __name__ == "__main__":
    closed_pipe.run(main)
