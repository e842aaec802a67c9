"""Prepare data for training: read rows from any source, apply the template, tokenise, check, split and pack them.

    python -m trainer.prepare CONF [key=value ...]

Reads data.source (or the parts of data.mixture) and the tokenizer in paths.model. Writes into paths.data:

    training.jsonl, validation.jsonl, test.jsonl    Megatron-Bridge's rows, with the index files that it would make
    training.idx.parquet, validation.idx.parquet    their tokens, and which are learned; packed with data.packed
    training.bin, training.idx, ...                 instead of these for texts: megatron-core's indexed data sets
    template.json                                   how rows become tokens; evaluation uses the same
    report.json                                     findings, and rows left out
    prepared.json                                   every file with its digest; training refuses changed files

data.processes processes prepare a few megabytes at a time, in a folder next to paths.data; an interrupted preparation
resumes. The previous data stay until the new data are complete. Rows written by hand, and all other files that
trainer.prepare did not write, are never replaced. Memory grows by about 100 bytes per row.
"""

from pathlib import Path

from conf.schema.run import Run
from contract.faults import Fault
from trainer.checks import places
from trainer.data.preparation import prepare
from trainer.startup import entry


def main(run: Run) -> None:
    prepare(run, run.data.parts, [None] * len(run.data.parts), Path(run.paths.data))


def check(run: Run) -> None:
    if not Path(run.paths.model).is_dir():
        raise Fault(f"paths.model: {run.paths.model}: no such folder; its tokenizer is needed")


if __name__ == "__main__":
    entry.start(main, check, alone=True, writes="data", may_write=places.check_prepare)
