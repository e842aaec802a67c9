"""Prove an exported model against the release and the trained weights.

    python -m trainer.proof.export CONF [key=value ...]     reads <paths.model>, .base, .output and .export

Weights that were not trained must equal the release's, bit by bit. A merged weight is computed again in fp32 from the
release and the adapter, and must agree within rounding. The adapter's file, the weights of a full fine-tuning and
weights rounded to the release's format must be bit-identical. Only one weight at a time is in memory. Exit code 1 and a
line for each weight that differs; 2 if nothing can be proven.
"""

from pathlib import Path

from conf.model_files import config_json, safetensors_header, weights
from conf.rules import shipping
from conf.schema.run import Run
from contract import checkpoints, json_object
from trainer.megatron.recipe import checkpoint_folder
from trainer.proof.findings import Findings, carry_out, census, check_release, same_bits
from trainer.startup import entry
from trainer.weights import released

EXPORT = "python -m trainer.export"


def main(run: Run) -> None:
    carry_out(_prove, run, Path(run.paths.export))


def _prove(run: Run, findings: Findings) -> str:
    from trainer.weights import trained as matched

    mark = checkpoints.require(Path(run.paths.export), "paths.export", EXPORT)
    whole = Path(run.paths.base) if mark["step"] == 0 else checkpoint_folder(run)
    trained = matched.find(run, checkpoints.step_folder(whole, mark["step"]))
    census(trained.model, Path(run.paths.base), findings)
    if mark["digest"] != trained.digest:
        findings.add(f"{run.paths.export}: was made from another release than {run.paths.base}")
    if "merged" in mark["formats"]:
        _merged(run, trained, Path(run.paths.export) / "merged", mark, findings)
    if "adapter" in mark["formats"]:
        _adapter(trained, Path(run.paths.export) / "adapter", findings)
    names = trained.adapters or trained.values
    return f"{len(names)} trained weights of {len(trained.model.weights)}, all others as released"


def _merged(run: Run, trained, folder: Path, mark: dict, findings: Findings) -> None:
    from trainer.weights.exported import as_released as format_of_release
    from trainer.weights.exported import merged_format, rounded_format

    model, codes = trained.model, shipping.is_rounded(run) and "codes" in mark
    as_released = "rounding" in mark and not codes
    rounding = rounded_format.open_rounded(run, trained) if codes else None
    layouts = rounding.layouts() if rounding else merged_format.layouts(model, as_released)
    rounding = format_of_release.Rounding(trained) if as_released else rounding
    for extra in sorted({path.name for path in folder.glob("*.safetensors")} - {layout.file for layout in layouts}):
        findings.add(f"{folder / extra}: this file is not part of the export")
    for layout in layouts:
        path, header = folder / layout.file, layout.header
        if not path.is_file() or path.stat().st_size != len(header) + layout.size:
            findings.add(f"{path}: missing, or of another length")
            continue
        with path.open("rb") as f:
            if f.read(len(header)) != header:
                findings.add(f"{path}: its header does not list the release's tensors with their places in the file")
                continue
        for name, place in layout.rows.items():
            with findings.of(name):
                if wrong := _wrong(trained, rounding, path, name, place):
                    findings.add(f"{path}: {name}: {wrong}")
            findings.moved(place.size)
    _other_files(model, folder, codes or (bool(model.packed) and not as_released), findings)


def _other_files(model: released.Model, folder: Path, unpacked: bool, findings: Findings) -> None:
    """Compare the files other than weights. config.json and the index of unpacked weights differ from the release's."""
    from trainer.weights.exported import merged_format

    written = {config_json.NAME, weights.INDEX} if unpacked else set()
    for path in merged_format.other_files(model):
        copy = folder / path.name
        if path.name not in written and (not copy.is_file() or copy.read_bytes() != path.read_bytes()):
            findings.add(f"{copy}: is not the release's")


def _wrong(trained, rounding, path: Path, name: str, place: weights.Entry) -> str:
    """Return the reason why the tensor at this place is wrong; "" if it is correct."""
    from trainer.weights import released_tensors

    model, source = trained.model, trained.copies.get(name, name)
    weight = rounding.weight(name) if rounding else name
    if rounding and rounding.has(weight):
        expected, wrong = rounding.tensors(weight).get(name), f"is not {weight} in the format of the export"
    elif source in trained.adapters:
        merged = trained.is_merged(source, released_tensors.at(path.parent, place))
        return "" if merged else "is not the released weight with its adapter"
    elif source in trained.values:
        expected, wrong = trained.tensor(name), "is not the trained weight"
    elif trained.packed and trained.packed.has(source):
        expected, wrong = trained.tensor(name), "is not the unpacked weight of the packed base"
    elif name in model.packed and place.dtype == model.packed[name].dtype:
        expected, wrong = released_tensors.read(model, name), "is not the unpacked released weight"
    else:
        is_right = released.has_sum(path, place, trained.sums[name])
        return "" if is_right else "was not trained, but is not the released one"
    return "" if same_bits(released_tensors.at(path.parent, place), expected) else wrong


def _adapter(trained, folder: Path, findings: Findings) -> None:
    """Compare the adapter's file with the factors in the checkpoint."""
    from trainer.weights import released_tensors
    from trainer.weights.exported import peft_format

    rows, file = peft_format.tensors(trained), peft_format.WEIGHTS
    entries = safetensors_header.read(folder / file)
    for name in sorted({row.key for row in rows} ^ entries.keys()):
        findings.add(f"{folder}: {name}: {'is not trained' if name in entries else 'missing'}")
    for row in rows:
        if row.key in entries:
            with findings.of(row.key):
                if not same_bits(released_tensors.at(folder, entries[row.key]), row.make()):
                    findings.add(f"{folder}: {row.key}: is not the trained weight")
                findings.moved(entries[row.key].size)
    alphas = {adapter.alpha for of_weight in trained.adapters.values() for adapter in of_weight}
    path = folder / peft_format.CONFIG
    if (alpha := json_object.read(path).get("lora_alpha")) not in alphas:
        findings.add(f"{path}: lora_alpha is {alpha}, but the adapter was trained with {max(alphas)}")


if __name__ == "__main__":
    entry.start(main, check_release, alone=True)
