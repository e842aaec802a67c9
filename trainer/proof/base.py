"""Prove that a base has every tensor of the release in its place, with bit-identical values.

    python -m trainer.proof.base CONF [key=value ...]       reads <paths.model> and <paths.base>, writes only a log

The release is compared with its checksums from the time of the conversion. Then each weight of the base is split into
released weights by the code of the export, which the conversion does not use, and compared bit by bit. Only one weight
at a time is in memory. For a packed base, codes and scales are computed again from these weights and compared byte by
byte; codes that were copied from the release must give the release's values. Exit code 1 and a line for each weight
that differs; 2 if nothing can be proven.
"""

from collections import defaultdict
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.proof.findings import Findings, carry_out, census, check_release, same_bits
from trainer.startup import entry
from trainer.weights import released


def main(run: Run) -> None:
    carry_out(_prove, run, Path(run.paths.base))


def _prove(run: Run, findings: Findings) -> str:
    from trainer.proof import packed
    from trainer.weights.trained import CONVERT, match

    base, model = Path(run.paths.base), released.read(Path(run.paths.model))
    mark = checkpoints.require(base, "paths.base", CONVERT)
    census(model, base, findings)
    try:
        trained = match(run, checkpoints.step_folder(base, 0))
    except Fault as fault:
        findings.add(str(fault))
        return ""
    stored, values = trained.stored, trained.values
    of_place = defaultdict(list)
    for value in values.values():
        for part in value:
            of_place[part.place.name].append(part)
    for place, parts in of_place.items():
        with findings.of(place):
            _compare(trained, parts, findings)
    rest = len(model.weights) - len(values)
    proved = f"{len(values)} weights of {model.folder} to the last bit, {rest} copies or left to the release"
    if mark.get("to") == "packed":
        proved += f", {packed.prove(base, mark['base'], stored, findings)} of them packed in {mark['base']}"
    return proved


def _compare(trained, values: list, findings: Findings) -> None:
    """Compare one of Megatron's weights with the released weights that it contains, or with the one it is part of."""
    from trainer.weights import mapping, torch_dist

    place = values[0].place
    whole = torch_dist.read(trained.stored, place)
    for value in values:
        name = value.part.name
        rows = trained.model.weights[name].shape[0] if value.trimmed else len(whole)
        actual = value.part.turn(value.part.rows(whole[:rows], trained.config))
        expected = mapping.read(trained.model, value.part).to(place.dtype)
        if not same_bits(actual, expected):
            findings.add(f"{name}: {place.name} differs from the release")
        if value.trimmed and whole[rows:].any():
            findings.add(f"{place.name}: its padding rows are not 0")
    findings.moved(whole.nbytes)


if __name__ == "__main__":
    entry.start(main, check_release, alone=True)
