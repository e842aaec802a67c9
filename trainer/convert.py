"""Convert a released checkpoint to Megatron's torch_dist format, and prove that nothing was lost on the way.

    python -m trainer.convert CONF [key=value ...]      on this host; CONF's layout says with how many processes
    torchrun ... -m trainer.convert RESOLVED.yaml       one of several hosts, on storage that all of them see

Reads <paths.model> and writes <paths.base>, which training and export read at any layout. The model is never in memory:
tensors go from mapped files to Megatron's one after another, and each process takes a part of them. No GPU is used. A
conversion that was killed goes on where it was, with any number of processes. A base that already comes from the same
tensors is left alone. Beside Megatron's files the base has source.json, the released tensors' types, shapes and
checksums, and complete.json, which says what it was made from and with.

Before the base is there, its first layers are computed on the same tokens by transformers (trainer/compare.py).

With convert.to none the base holds that account alone, and with packed, beside it, the weights in the format of
model.base (trainer/weights/packed_base/files.py), with the error of each matrix in packed-base.jsonl.

With model.mtp false the multi-token-prediction layers stay out of the base; an export copies them from the release.
A quantised release (conf/model_files/quantization.py) is unpacked weight by weight, without a copy on disk. The
floating-point type is train.precision's: a released fp32 tensor loses digits in bf16.
"""

import importlib.metadata
import json
import os
import warnings
from pathlib import Path

from conf.rules import packed_base
from conf.schema.run import Run
from contract import checkpoints
from contract.output_marks import BASE, JOURNAL
from trainer import compare
from trainer.checks import inputs, places
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say
from trainer.weights import atomic_folder, released

TOOLS = ("megatron-bridge", "megatron-core", "torch", "transformers")


def main(run: Run) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed
    device.start()
    import torch

    torch.distributed.init_process_group("gloo")
    model, base = released.read(Path(run.paths.model)), Path(run.paths.base)
    facts = {"architecture": model.config["architectures"][0], "precision": run.train.precision, "mtp": run.model.mtp}
    before, stamps = atomic_folder.gather((checkpoints.read_mark(base) or {}, model.stamps()))[0]  # as rank 0 sees them
    if run.convert.to != "torch_dist":
        # What decides, besides, in which pieces the checkpoint has its weights: tp pads the vocabulary.
        facts |= {"to": run.convert.to, "tp": run.layout.tp, "grouped_gemm": run.moe.grouped_gemm}
    if run.convert.to == "packed":
        facts |= {"base": run.model.base, "pack": sorted(packed_base.parts(run))}
        before = {"pack": sorted(packed_base.PARTS)} | before  # which those of before do not say
    same = all(before.get(key) == value for key, value in facts.items()) and ("to" in before) == ("to" in facts)
    if same and before["stamps"] == stamps:
        say(f"convert: {base} is already there, from these {before['tensors']} tensors")
    else:
        sums = _checksums(model, _recorded(base)) if same else None
        if sums and before["digest"] == released.digest(model, sums):
            say(f"convert: {base} is already there, from the same {before['tensors']} tensors")
        else:
            _convert(run, model, sums, facts | {"stamps": stamps})
            how = {"none": "describes", "packed": f"holds, in {run.model.base},"}.get(run.convert.to, "holds")
            say(f"convert: {base} {how} all {len(model.tensors)} tensors of {model.folder}")
    torch.distributed.destroy_process_group()


def _convert(run: Run, model: released.Model, known: dict[str, str] | None, facts: dict) -> None:
    """Convert the model. `known` are its tensors' checksums, if they are known; else they are found out here."""
    from trainer.megatron.model import open_bridge
    from trainer.weights.conversion import base
    from trainer.weights.packed_base import conversion as packed

    warnings.filterwarnings("ignore", "ModelProviderMixin-based")  # no user can migrate it
    facts["tools"] = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    with megatron_to(Path(run.paths.logs)):
        conversion = base.Conversion(run, open_bridge(run), model, known)
        facts |= {"left_out": conversion.left_out, "tensors": len(model.tensors)}
        made = json.dumps([facts, conversion.digest, released.CHECKSUMS], sort_keys=True)
        with atomic_folder.write(Path(run.paths.base), facts, BASE, made) as partial:
            sums = conversion.write(partial, partial / JOURNAL, weights=run.convert.to == "torch_dist")
            facts["digest"] = released.digest(model, sums)
            if atomic_folder.rank() == 0:
                base.record(model, sums, partial)
            if run.convert.to == "packed":
                packed.write(run, conversion.chunks, partial, partial / JOURNAL / "packed")
            compare.converted(run, partial)  # while the disk writes
            conversion.settle()


def _recorded(base: Path) -> dict[str, str]:
    """Checksums of the tensors that the base was made from."""
    rows = json.loads((base / released.SOURCE).read_text())
    return {name: checksum for name, (_, _, checksum) in rows.items()}


def _checksums(model: released.Model, recorded: dict[str, str]) -> dict[str, str]:
    names = sorted(model.tensors, key=lambda name: model.tensors[name].size)[
        atomic_folder.rank() :: atomic_folder.ranks()
    ]
    parts = atomic_folder.gather(released.checksums(model, names, recorded))
    if infinite := sorted(name for _, found in parts for name in found):
        raise released.not_finite(model, infinite)
    return {name: checksum for sums, _ in parts for name, checksum in sums.items()}


def imports(run: Run) -> None:
    """Import what every rank needs."""
    from trainer.megatron.model import load_family
    from trainer.weights.conversion import base, same_function  # noqa: F401
    from trainer.weights.packed_base import conversion  # noqa: F401

    load_family(run)


if __name__ == "__main__":
    entry.start(main, inputs.check_convert, writes="base", may_write=places.check_convert, imports=imports)
