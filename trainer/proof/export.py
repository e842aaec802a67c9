"""Prove an exported model against the release and what was trained.

    python -m trainer.proof.export CONF [key=value ...]     reads <paths.model>, .base, .output and .export

What was not trained must be the release's, bit by bit. A merged weight is computed once more in fp32 from the release
and the adapter, and must agree within rounding; the adapter's own file, a full fine-tuning and what was rounded to the
release's format, to the last bit. A weight at a time is in memory. Exit code 1 and a line for each weight that differs;
2 where nothing can be proven.
"""

import json
from pathlib import Path

from conf.model_files import config_json, safetensors_header, weights
from conf.model_files.weights import Entry
from conf.schema.run import Run
from contract import checkpoints, json_object
from trainer.megatron.recipe import checkpoint_folder
from trainer.proof.findings import Findings, carry_out, census, check_release
from trainer.startup import entry
from trainer.weights import released

EXPORT = "python -m trainer.export"


def main(run: Run) -> None:
    carry_out(_prove, run, Path(run.paths.export))


def _prove(run: Run, found: Findings) -> str:
    from trainer.weights import trained as matched

    made = checkpoints.require(Path(run.paths.export), "paths.export", EXPORT)
    whole = Path(run.paths.base) if made["step"] == 0 else checkpoint_folder(run)
    trained = matched.find(run, checkpoints.step_folder(whole, made["step"]))
    found.total += sum(one.size for one in trained.model.tensors.values())
    recorded = json.loads((Path(run.paths.base) / released.SOURCE).read_text())
    census(trained.model, recorded, found)
    if made["digest"] != trained.digest:
        found.add(f"{run.paths.export}: was made from another release than {run.paths.base}")
    if "merged" in made["formats"]:
        _merged(trained, Path(run.paths.export) / "merged", "rounding" in made, found)
    if "adapter" in made["formats"]:
        _adapter(trained, Path(run.paths.export) / "adapter", found)
    names = trained.adapters or trained.values
    return f"{len(names)} trained weights of {len(trained.model.weights)}, all others as released"


def _merged(trained, folder: Path, as_released: bool, found: Findings) -> None:
    from trainer.weights.exported import as_released as format_of_release
    from trainer.weights.exported import merged_format

    model, rounding = trained.model, format_of_release.Rounding(trained)
    layouts = (format_of_release if as_released else merged_format).layouts(model)
    for extra in sorted({path.name for path in folder.glob("*.safetensors")} - {layout.file for layout in layouts}):
        found.add(f"{folder / extra}: no such file was exported")
    for layout in layouts:
        path, header, entries = folder / layout.file, layout.header, layout.rows
        if not path.is_file() or path.stat().st_size != len(header) + sum(one.size for one in entries.values()):
            found.add(f"{path}: missing, or of another length")
            continue
        with path.open("rb") as f:
            if f.read(len(header)) != header:
                found.add(f"{path}: its header does not list the release's tensors as they lie in it")
                continue
        for name, place in entries.items():
            with found.of(name):
                if wrong := _wrong(trained, rounding if as_released else None, path, name, place):
                    found.add(f"{path}: {name}: {wrong}")
            found.moved(place.size)
    _other_files(model, folder, bool(model.packed) and not as_released, found)


def _other_files(model: released.Model, folder: Path, unpacked: bool, found: Findings) -> None:
    """Compare what is copied beside the weights. config.json and the index tell of the weights as they are written."""
    from trainer.weights.exported import merged_format

    written = {config_json.NAME, weights.INDEX} if unpacked else set()
    for path in merged_format.other_files(model):
        there = folder / path.name
        if path.name not in written and (not there.is_file() or there.read_bytes() != path.read_bytes()):
            found.add(f"{there}: is not the release's")


def _wrong(trained, rounding, path: Path, name: str, place: Entry) -> str:
    """Why the tensor at this place is wrong; "" where it is right."""
    from trainer.weights import released_tensors
    from trainer.weights.exported import merged_format

    model, source = trained.model, trained.copies.get(name, name)
    if rounding:
        weight = next((one for one, packed in model.packed.items() if name in packed.tensors), name)
        if weight in model.packed and trained.has(weight):
            there = released_tensors.at(path.parent, place)
            same = _same(there, rounding.parts(weight)[name]) if name in rounding.parts(weight) else False
            return "" if same else f"is not what training has made of {weight}, in the release's format"
    if source in trained.adapters:
        merged = merged_format.is_merged(trained, source, released_tensors.at(path.parent, place))
        return "" if merged else "is not the released weight with its adapter"
    if source in trained.values:
        same = _same(released_tensors.at(path.parent, place), trained.tensor(name))
        return "" if same else "is not what was trained"
    if trained.packed and trained.packed.has(source):
        same = _same(released_tensors.at(path.parent, place), trained.tensor(name))
        return "" if same else "is not the weight that training kept packed, unpacked"
    if name in model.packed:
        same = _same(released_tensors.at(path.parent, place), released_tensors.read(model, name))
        return "" if same else "is not the released weight, unpacked"
    return "" if released.has_sum(path, place, trained.sums[name]) else "was not trained, and is not the released"


def _adapter(trained, folder: Path, found: Findings) -> None:
    """Compare the adapter's file with the factors that the checkpoint has."""
    from trainer.weights import released_tensors
    from trainer.weights.exported import peft_format

    rows, file = peft_format.tensors(trained), peft_format.WEIGHTS
    found_there = safetensors_header.read(folder / file).items()
    there = {name: Entry(one.dtype, one.shape, file, one.start, one.size) for name, one in found_there}
    for name in sorted({row.key for row in rows} ^ there.keys()):
        found.add(f"{folder}: {name}: {'is not trained' if name in there else 'missing'}")
    for row in rows:
        if row.key in there:
            with found.of(row.key):
                if not _same(released_tensors.at(folder, there[row.key]), row.make()):
                    found.add(f"{folder}: {row.key}: is not what was trained")
                found.moved(there[row.key].size)
    alphas = {adapter.alpha for of_weight in trained.adapters.values() for adapter in of_weight.each}
    path = folder / peft_format.SETTINGS
    if (alpha := json_object.read(path).get("lora_alpha")) not in alphas:
        found.add(f"{path}: lora_alpha is {alpha}, and the adapter was trained with {max(alphas)}")


def _same(found, expected) -> bool:
    import torch

    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    flat = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))
    return torch.equal(*flat)


if __name__ == "__main__":
    entry.start(main, check_release, alone=True)
