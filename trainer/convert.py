"""Convert a released checkpoint to Megatron's torch_dist format, and prove that nothing was lost on the way.

    python -m trainer.convert CONF [key=value ...]      on this host; CONF's layout says with how many processes
    torchrun ... -m trainer.convert RESOLVED.yaml       one of several hosts, on storage that all of them see

Reads <paths.model> and writes <paths.base>, which training and export read at any layout. The files are read twice,
once for checksums and once for the weights, tensor by tensor; the ranks together hold the model once in memory. A base
that already comes from the same tensors is left alone. Beside Megatron's files the base has source.json, the released
tensors' types, shapes and checksums, and complete.json, which says what it was made from and with.

With model.mtp false the multi-token-prediction layers stay out of the base; an export copies them from the release.
FP8 releases are refused. The floating-point type is train.precision's: a released fp32 tensor loses digits in bf16.
"""

import importlib.metadata
import json
import os
import warnings
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from contract.output_marks import BASE
from trainer.checks import inputs, places
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say
from trainer.weights import atomic_folder, released

TOOLS = ("megatron-bridge", "megatron-core", "torch", "transformers")


def main(run: Run) -> None:
    device.start()
    import torch

    if device.has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(device.backend())
    model, base = released.read(Path(run.paths.model)), Path(run.paths.base)
    facts = {"architecture": model.config["architectures"][0], "precision": run.train.precision, "mtp": run.model.mtp}
    before, stamps = atomic_folder.gather((checkpoints.read_mark(base) or {}, model.stamps()))[0]  # as rank 0 sees them
    same = all(before.get(key) == value for key, value in facts.items())
    if same and before["stamps"] == stamps:
        say(f"convert: {base} is already there, from these {before['tensors']} tensors")
    else:
        sums = _checksums(model)
        facts |= {"digest": released.digest(model, sums), "tensors": len(model.tensors), "stamps": stamps}
        facts["tools"] = {tool: importlib.metadata.version(tool) for tool in TOOLS}
        if same and before["digest"] == facts["digest"]:
            say(f"convert: {base} is already there, from the same {before['tensors']} tensors")
        else:
            _convert(run, model, sums, facts)
            say(f"convert: {base} holds all {len(model.tensors)} tensors of {model.folder}")
    torch.distributed.destroy_process_group()


def _convert(run: Run, model: released.Model, sums: dict[str, str], facts: dict) -> None:
    from trainer.megatron.model import make_provider, open_bridge
    from trainer.weights import coverage

    warnings.filterwarnings("ignore", "ModelProviderMixin-based")  # no user can migrate it
    base = Path(run.paths.base)
    left_out = set() if run.model.mtp else released.of_mtp(model)
    facts["left_out"] = sorted(left_out)
    with megatron_to(Path(run.paths.logs)), atomic_folder.write(base, facts, BASE) as partial:
        bridge = open_bridge(run)
        provider = make_provider(run, bridge)
        provider.perform_initialization = False
        provider.finalize()
        provider.initialize_model_parallel(seed=run.train.seed)
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
        coverage.check(coverage.demand(bridge, chunks), model, sums, left_out)
        coverage.fill_with_nan(chunks)
        bridge.load_hf_weights(chunks)
        if holes := coverage.unfilled(chunks):
            raise Fault(f"{model.folder}: not filled, or not a number: {released.enumerate_names(holes)}")
        bridge.save_megatron_model(chunks, partial)
        if atomic_folder.rank() == 0:
            rows = {name: [t.dtype, t.shape, sums[name]] for name, t in model.tensors.items()}
            (partial / released.SOURCE).write_text(json.dumps(rows))


def _checksums(model: released.Model) -> dict[str, str]:
    parts = atomic_folder.gather(
        released.checksums(model, model.files()[atomic_folder.rank() :: atomic_folder.ranks()])
    )
    if infinite := sorted(name for _, names in parts for name in names):
        text = f"{len(infinite)} tensors hold numbers that are infinite or not a number"
        raise Fault(f"{model.folder}: {text}: {released.enumerate_names(infinite)}; download it again")
    return {name: checksum for sums, _ in parts for name, checksum in sums.items()}


if __name__ == "__main__":
    entry.start(main, inputs.check_convert, writes="base", may_write=places.check_convert, gpus="convert")
