"""Prove a base against the release: every tensor has its place, and its numbers to the last bit.

    python -m trainer.proof.base CONF [key=value ...]       reads <paths.model> and <paths.base>, and writes a log alone

The release is compared with what it was when the base was made. Then each weight of the base is taken apart into the
released ones, as an export does it, and compared bit by bit; that is another way than the one that a conversion goes. A
weight at a time is in memory. Of a base that was packed once, the codes and scales are then made again of these
weights, and compared byte by byte; those that were taken over must stand for the release's very numbers. Exit code 1
and a line for each weight that differs; 2 where nothing can be proven.
"""

import json
from collections import defaultdict
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.proof.findings import Findings, carry_out, census, check_release
from trainer.startup import entry
from trainer.weights import released


def main(run: Run) -> None:
    carry_out(_prove, run, Path(run.paths.base))


def _prove(run: Run, found: Findings) -> str:
    from trainer.megatron.model import open_bridge
    from trainer.proof import packed
    from trainer.weights import merge
    from trainer.weights.conversion import unwritten
    from trainer.weights.trained import CONVERT

    base, model = Path(run.paths.base), released.read(Path(run.paths.model))
    made = checkpoints.require(base, "paths.base", CONVERT)
    found.total += sum(entry.size for entry in model.tensors.values())
    census(model, json.loads((base / released.SOURCE).read_text()), found)
    bridge = open_bridge(run)
    registry, config = bridge._model_bridge.mapping_registry(), bridge.to_megatron_provider(load_weights=False)
    computed = {name for name in model.weights if released.COMPUTED.search(name)}
    elsewhere = {*released.repeated(model), *computed, *made["left_out"]}
    try:
        stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
        values = merge.find_values(stored, registry, model, elsewhere)
    except Fault as fault:
        found.add(str(fault))
        return ""
    of_place = defaultdict(list)
    for value in values.values():
        for one in value.each:
            of_place[one.place.name].append(one)
    for place, parts in of_place.items():
        with found.of(place):
            _compare(model, stored, config, parts, found)
    proved = f"{len(values)} weights of {model.folder} to the last bit, {len(elsewhere)} copies or left to the release"
    if made.get("to") == "packed":
        proved += f", {packed.prove(base, made['base'], stored, found)} of them packed in {made['base']}"
    return proved


def _compare(model: released.Model, stored, config, values: list, found: Findings) -> None:
    """Compare one of Megatron's weights with the released ones that it is made of, or is an expert of."""
    import torch

    from trainer.weights import mapping, torch_dist

    place = values[0].place
    whole = torch_dist.read(stored, place)
    for value in values:
        name = value.part.name
        rows = model.weights[name].shape[0] if value.trimmed else len(whole)
        there = value.part.turn(value.part.rows(whole[:rows], config))
        expected = mapping.read(model, value.part).to(place.dtype)
        if there.shape != expected.shape or not torch.equal(_bits(there), _bits(expected)):
            found.add(f"{name}: {place.name} does not hold it as released")
        if value.trimmed and whole[rows:].any():
            found.add(f"{place.name}: the rows that pad it are not 0")
    found.moved(whole.nbytes)


def _bits(tensor):
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


if __name__ == "__main__":
    entry.start(main, check_release, alone=True)
