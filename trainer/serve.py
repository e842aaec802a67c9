"""Serve a model by vLLM's server with OpenAI's interface, until it is told to end.

    python -m trainer.serve MODEL.json        which python -m flows.serve writes (contract/served_model.py)

The engine is that of the evaluation: its precision, its patches, safetensors alone, and nothing from the network. The
server's chat template is the template of the data that the model was trained on. What vLLM prints is the output.
"""

import argparse
from pathlib import Path

from contract.served_model import ServedModel
from trainer.serving import api_server
from trainer.startup import entry


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.serve", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON, as contract/served_model.py writes it")
    options = parser.parse_args()
    with entry.faults_in_one_line():
        api_server.serve(ServedModel.read(options.file))


if __name__ == "__main__":
    main()
