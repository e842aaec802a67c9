"""Serve a model with vLLM's OpenAI-compatible server until it is stopped.

    python -m trainer.serve MODEL.json        written by python -m flows.serve (contract/served_model.py)

The engine equals that of the evaluation: its precision, its patches, safetensors only, and no network access. The
server's chat template is the template of the training data. The output is vLLM's.
"""

from pathlib import Path

from trainer.serving import api_server
from trainer.startup import entry


def main() -> None:
    parser = entry.parser("trainer.serve", __doc__)
    parser.add_argument("file", type=Path, help="JSON, as contract/served_model.py writes it")
    options = parser.parse_args()
    with entry.faults_in_one_line():
        api_server.serve(options.file)


if __name__ == "__main__":
    main()
