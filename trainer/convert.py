"""Convert a released checkpoint to Megatron's torch_dist format, and prove that nothing was lost.

    python -m trainer.convert CONF [key=value ...]      on this host; CONF's layout sets the number of processes
    torchrun ... -m trainer.convert RESOLVED.yaml       one of several hosts, with storage that all of them share

Reads <paths.model> and writes <paths.base>, which training and export read at any layout. The model is never in memory
as a whole: tensors go from mapped files to Megatron's one after another, and each process converts a part of them. No
GPU is used. An interrupted conversion resumes, with any number of processes. A base made from the same tensors is kept.
In addition to Megatron's files the base has source.json, with the released tensors' types, shapes and checksums, and
complete.json, which records inputs and tool versions.

Before the base is published, transformers computes its first layers on the same tokens (trainer/compare.py).

With convert.to none the base has only these two descriptions. With packed it also has the weights in the format of
model.base (trainer/weights/packed_base/files.py), and the error of each matrix in packed-base.jsonl.

With model.mtp false the multi-token-prediction layers are not in the base; an export copies them from the release. A
quantised release (conf/model_files/quantization.py) is unpacked weight by weight, without a copy on disk. The
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
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is used
    device.start()
    import torch

    torch.distributed.init_process_group("gloo")
    model, base = released.read(Path(run.paths.model)), Path(run.paths.base)
    facts = {"architecture": model.config["architectures"][0], "precision": run.train.precision, "mtp": run.model.mtp}
    before, stamps = atomic_folder.gather((checkpoints.read_mark(base) or {}, model.stamps()))[0]  # rank 0's
    if run.convert.to != "torch_dist":
        # These also determine the pieces of the weights: tp pads the vocabulary.
        facts |= {"to": run.convert.to, "tp": run.layout.tp, "grouped_gemm": run.moe.grouped_gemm}
    if run.convert.to == "packed":
        facts |= {"base": run.model.base, "pack": sorted(packed_base.parts(run))}
        before = {"pack": sorted(packed_base.PARTS)} | before  # older marks lack the key
    same = all(before.get(key) == value for key, value in facts.items()) and ("to" in before) == ("to" in facts)
    if same and before["stamps"] == stamps:
        say(f"convert: {base} already exists, from these {before['tensors']} tensors")
    else:
        sums = _checksums(model, released.recorded_sums(base)) if same else None
        if sums and before["digest"] == released.digest(model, sums):
            say(f"convert: {base} already exists, from the same {before['tensors']} tensors")
        else:
            _convert(run, model, sums, facts | {"stamps": stamps})
            how = {"none": "describes", "packed": f"holds, in {run.model.base},"}.get(run.convert.to, "holds")
            say(f"convert: {base} {how} all {len(model.tensors)} tensors of {model.folder}")
    torch.distributed.destroy_process_group()


def _convert(run: Run, model: released.Model, known: dict[str, str] | None, facts: dict) -> None:
    """Convert the model. `known` are its tensors' checksums; if None, they are computed."""
    from trainer.megatron.model import open_bridge
    from trainer.weights.conversion import base, shards
    from trainer.weights.packed_base import conversion as packed

    warnings.filterwarnings("ignore", "ModelProviderMixin-based")  # no user can migrate it
    facts["tools"] = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    with megatron_to(Path(run.paths.logs)):
        conversion = base.Conversion(run, open_bridge(run), model, known)
        facts |= {"left_out": conversion.left_out, "tensors": len(model.tensors)}
        state = json.dumps([facts, shards.digest(conversion.shards), released.CHECKSUMS], sort_keys=True)
        with atomic_folder.write(Path(run.paths.base), facts, BASE, state) as partial:
            sums = conversion.write(partial, partial / JOURNAL, weights=run.convert.to == "torch_dist")
            facts["digest"] = released.digest(model, sums)
            if atomic_folder.rank() == 0:
                base.record(model, sums, partial)
            if run.convert.to == "packed":
                packed.write(run, conversion.chunks, partial, partial / JOURNAL / "packed")
            compare.converted(run, partial)  # in parallel with the disk's writes
            conversion.work.wait()


def _checksums(model: released.Model, recorded: dict[str, str]) -> dict[str, str]:
    names = sorted(model.tensors, key=lambda name: model.tensors[name].size)[
        atomic_folder.rank() :: atomic_folder.ranks()
    ]
    parts = atomic_folder.gather(released.checksums(model, names, recorded))
    if infinite := sorted(name for _, names in parts for name in names):
        raise released.not_finite(model, infinite)
    return {name: checksum for sums, _ in parts for name, checksum in sums.items()}


def imports(run: Run) -> None:
    """Import the modules that every rank needs."""
    from trainer.megatron.model import load_family
    from trainer.weights.conversion import base, same_function  # noqa: F401
    from trainer.weights.packed_base import conversion  # noqa: F401

    load_family(run)


if __name__ == "__main__":
    entry.start(main, inputs.check_convert, writes="base", may_write=places.check_convert, imports=imports)
