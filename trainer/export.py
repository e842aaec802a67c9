"""Export a trained checkpoint to Hugging Face's formats: the merged model, and the adapter alone.

    python -m trainer.export CONF [key=value ...]       on this host; the layout's processes share the work
    torchrun ... -m trainer.export RESOLVED.yaml        one of several hosts, with storage that all of them share

Reads the released model, the base made from it (trainer.convert) and a checkpoint (trainer.train, or the base itself).
Writes <paths.export>/merged, the released checkpoint with the trained weights, for any server; <paths.export>/adapter,
for PEFT; a GGUF file of the merged model in <paths.export>/gguf, if export.gguf is set; and
complete.json. The checkpoint may come from any layout. No model is built and no GPU is used: the processes write parts
of files, a few weights at a time. An interrupted export resumes, with any number of processes.

The export fails if a trained tensor has no place in the released model, if a released tensor gets no value, if a tensor
of the checkpoint differs from the one in memory when training saved it, or if one is left unused.
"""

import importlib.metadata
import json
from pathlib import Path

from conf.rules import packed_base, shipping
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from contract.output_marks import EXPORT, JOURNAL
from trainer.checks import inputs, places
from trainer.megatron.recipe import checkpoint_folder
from trainer.startup import device, entry
from trainer.startup.console import megatron_to, say
from trainer.weights import atomic_folder
from trainer.weights.released import enumerate_names

TOOLS = ("megatron-bridge", "megatron-core", "torch")


def main(run: Run) -> None:
    device.start()
    import torch
    from torch import distributed

    from trainer.weights.exported import as_released as format_of_release
    from trainer.weights.exported import peft_format
    from trainer.weights.packed_base import as_trained
    from trainer.weights.trained import find

    torch.set_num_threads(1)  # weights are small: several are merged in parallel, one thread each
    distributed.init_process_group("gloo")
    target = Path(run.paths.export)
    with megatron_to(Path(run.paths.logs)):
        folder, step = _checkpoint(run)
        if run.export.weights == "ema":
            folder = folder / checkpoints.MEANS
            if not folder.is_dir():
                raise Fault(f"export.weights: ema, but {folder} does not exist: training ran without train.ema_decay")
        trained = find(run, folder)
        formats = run.export.formats or (("merged", "adapter") if trained.adapters else ("merged",))
        facts = {"step": step, "digest": trained.digest, "formats": formats} | _trained_facts(trained)
        if "adapter" in formats:
            peft_format.check(trained)
        state = json.dumps([facts, _state(run, folder, trained.model)], sort_keys=True)
        with atomic_folder.write(target, facts, EXPORT, state) as partial:
            facts |= _write(run, trained, formats, partial)
    say(f"export: {_compared(trained.stored)}")
    merged = f"{len(trained.adapters)} weights {'merged' if 'merged' in formats else 'adapted'}"
    say(f"export: {target} holds {' and '.join(formats)} of {folder}, {merged}")
    if rounding := facts.get("rounding"):
        say(f"export: {format_of_release.summary(rounding)}")
    if apart := facts.get("from_training"):
        say(f"export: {as_trained.summary(apart)}")
    if left_out := facts.get("left_out"):
        say(f"export: adapter/ lacks {len(left_out)} of them, of MTP layers, which transformers does not build")
    distributed.destroy_process_group()


def _checkpoint(run: Run) -> tuple[Path, int]:
    """Return the folder to export, and its step; step 0 is the base."""
    if run.export.checkpoint == "base":
        return checkpoints.step_folder(Path(run.paths.base), 0), 0
    folder = checkpoint_folder(run)
    steps = checkpoints.complete_steps(folder)
    if not steps:
        raise Fault(f"{folder}: no complete checkpoint; python -m trainer.train makes one")
    step = steps[-1] if run.export.checkpoint == "latest" else run.export.checkpoint
    if step == "best":
        best = checkpoints.best(folder)
        if best is None:
            raise Fault(f"export.checkpoint: best, but no checkpoint in {folder} has a validation loss; use latest")
        step = best[0]
    if step not in steps:
        raise Fault(f"export.checkpoint: {step} is not complete in {folder}; complete: {', '.join(map(str, steps))}")
    return checkpoints.step_folder(folder, step), step


def _state(run: Run, folder: Path, model) -> list:
    """Return the state that must be unchanged for an interrupted export to resume."""
    base = Path(run.paths.base)
    marks = [mark.stat().st_mtime_ns for place in (folder, base) if (mark := place / checkpoints.MARK).exists()]
    tools = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    keys = run.export.quantization, run.export.merge_onto, run.export.gguf, run.train.precision
    return [str(folder.resolve()), marks, model.stamps(), *keys, tools]


def _trained_facts(trained) -> dict:
    """Return facts on the weights that an evaluation needs to serve them: trainer/serving/agreement.py."""
    from trainer.weights import digests

    in_memory = trained.stored.in_memory
    if in_memory is None:
        return {}
    return {"trained": {"weights": digests.of_all(in_memory["digests"]), "prompts": in_memory["prompts"]}}


def _compared(stored) -> str:
    if stored.in_memory is None:
        return f"{stored.folder} has no digests of training's memory, so its tensors were not compared"
    count, step = len(stored.digests), stored.in_memory["step"]
    return f"{count} of {count} trained tensors are those that were in memory at step {step}, by their digests"


def _require_all_used(trained, left_out: list[str]) -> None:
    """Check that some rank read each trained tensor for an exported weight.

    Adapters in `left_out` are reported elsewhere, and count as used.
    """
    used = set().union(*atomic_folder.gather(trained.stored.seen))
    for name in left_out:
        used |= {place.name for adapter in trained.adapters[name] for place in adapter.places}
    unused = sorted(trained.stored.weights.keys() - used)
    if unused:
        raise Fault(
            f"{trained.stored.folder}: {len(unused)} trained tensors are not in any exported weight: "
            f"{enumerate_names(unused)}"
        )


def _from_training(run: Run, trained, partial: Path, entries: list) -> dict:
    """Return how far a packed base's merged weights are from those in training; one rank writes it to a file."""
    from trainer.weights.packed_base import as_trained
    from trainer.weights.quantised import report

    if not (packed_base.format_of(run) and trained.adapters):
        return {}
    numbers = trained.packed
    rows = as_trained.lines(numbers, run.model.base, entries) if numbers else as_trained.lines_of_training(run)
    if rows and atomic_folder.rank() == 0:
        report.write_lines(partial / as_trained.NAME, rows)
    return {"from_training": rows[0]} if rows else {}


def _codes(run: Run, trained):
    """Return the contents of files with codes of other formats than the release's; None if there are none."""
    from trainer.weights.exported import packed_format, rounded_format

    if run.export.quantization == "packed":
        return packed_format.open_codes(run, trained)
    return rounded_format.open_rounded(run, trained) if shipping.is_rounded(run) else None


def _write(run: Run, trained, formats: tuple[str, ...], partial: Path) -> dict:
    from trainer.weights.exported import as_released as format_of_release
    from trainer.weights.exported import gguf_format, merged_format, parts, peft_format

    facts = {}
    if "merged" in formats:
        as_released = run.export.quantization == "as_released"
        codes, form = _codes(run, trained), run.export.quantization if shipping.is_rounded(run) else run.model.base
        source = codes or (format_of_release.Rounding(trained) if as_released else parts.Merged(trained))
        layouts = codes.layouts() if codes else merged_format.layouts(trained.model, as_released)
        journal = partial / JOURNAL
        entries = parts.write(source, layouts, partial / "merged", journal)
        if as_released or shipping.is_rounded(run):
            facts["rounding"] = format_of_release.lost(entries, as_released) | ({} if as_released else {"to": form})
        facts |= _from_training(run, trained, partial, entries) | ({"codes": form} if codes else {})
        if atomic_folder.rank() == 0:
            facts["chat_template"] = merged_format.copy_other_files(trained.model, partial / "merged", as_released)
            if codes:
                codes.describe(partial / "merged")
            if kind := run.export.gguf:
                path = partial / "gguf" / f"{run.name}-{kind}.gguf"
                gguf_format.write(partial / "merged", path, kind, run.model.trust_remote_code)
                say(f"export: {path.name} is written and read back")
        _require_all_used(trained, [])
    if "adapter" in formats and atomic_folder.rank() == 0:
        facts["left_out"] = peft_format.write(trained, partial / "adapter", adapted_model(run))
    if "merged" not in formats:
        _require_all_used(trained, max(atomic_folder.gather(facts.get("left_out", [])), key=len))
    return facts


def adapted_model(run: Run) -> str:
    """Return the name of the adapter's base. With model.merge_adapter, the base differs from the release."""
    merged = run.model.merge_adapter
    return f"{run.model.source} with {merged} merged" if merged else str(run.model.source)


def imports(run: Run) -> None:
    """Import the modules that every rank needs."""
    from trainer.megatron.model import load_family
    from trainer.weights.exported import as_released, peft_format  # noqa: F401
    from trainer.weights.trained import find  # noqa: F401

    load_family(run)


if __name__ == "__main__":
    entry.start(main, inputs.check_export, writes="export", may_write=places.check_export, imports=imports)
