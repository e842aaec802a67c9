"""Draw random weights for a model that will be trained from scratch.

    python -m trainer.weights.drawn CONFIG.json OUT --tokenizer FOLDER [--seed N]

OUT becomes a folder in Hugging Face's format; it appears only when it is complete. Equal arguments give equal bytes on
any host.
"""

import time
from pathlib import Path

from conf.model_files import config_json
from contract import closed_pipe
from contract.amounts import size
from contract.faults import Fault
from trainer.startup import entry
from trainer.startup.console import say
from trainer.weights.drawn import files

EVERY = 5.0  # seconds between lines


def main() -> int:
    parser = entry.parser("trainer.weights.drawn", __doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.json", help="config.json of the model")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder for the model")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="folder with the tokenizer")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    with entry.faults_in_one_line():
        _draw(options.config, options.tokenizer, options.out, options.seed)
    return 0


def _draw(config: Path, tokenizer: Path, out: Path, seed: int) -> None:
    reported = started = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported >= EVERY:
            reported = time.monotonic()
            say(f"draw: {size(done)} of {size(total)}, after {reported - started:.0f} s")

    try:
        files.write(config_json.read(config), tokenizer, out, seed, report)
    except OSError as error:
        raise Fault(f"{error.filename or out}: {error.strerror or error}") from None


if __name__ == "__main__":
    closed_pipe.run(main)
