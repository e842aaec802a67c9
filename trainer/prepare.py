"""Data for training: rows from any source, understood, templated, tokenised, checked, split and packed.

    python -m trainer.prepare CONF [key=value ...]

Reads data.source (or the parts of data.mixture) and the tokenizer in paths.model. Writes into paths.data:

    training.jsonl, validation.jsonl, test.jsonl    Megatron-Bridge's rows, with the index files that it would make
    training.idx.parquet, validation.idx.parquet    their tokens, and which are learned; packed where data.packed
    training.bin, training.idx, ...                 in place of these for texts: megatron-core's indexed data sets
    template.json                                   how rows became tokens; evaluation uses the same
    report.json                                     what was found, and what was left out
    prepared.json                                   every file with its digest; training refuses what has been changed

The work is done a few megabytes at a time by data.processes processes, in a folder beside paths.data; killed, it goes
on where it was. What was prepared before stays there until all is made; rows made by hand, and what else is not
trainer.prepare's, are never replaced. Memory grows by about 100 bytes a row.
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
        raise Fault(f"paths.model: {run.paths.model}: no such folder; the tokenizer in it is needed")


if __name__ == "__main__":
    entry.start(main, check, alone=True, writes="data", may_write=places.check_prepare)
