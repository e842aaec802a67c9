"""Check that a run may resume from the checkpoints in its output folder: each checkpoint's mark describes its training.

The mark records the keys of the run that saved it (conf/schema/identity.py), the source of its base, and the digest of
the tokens that it was trained on. A resume may change the layout, the batch of a rank, recomputation, kernels and
reports. It must not change anything that affects the trained weights. This includes the learning rate's schedule:
nobody could repeat a training with parts of two schedules.

Checkpoints that were saved before marks had such a record are compared by Megatron-Bridge's run_config.yaml; their base
and data cannot be compared.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from conf.model_files import config_json
from conf.rules import auxiliary_losses
from conf.schema import identity
from conf.schema.run import Run
from contract import checkpoints, checksums, indexed_files
from contract.faults import Fault
from trainer.data import blend, prepared
from trainer.startup import entry
from trainer.startup.console import say
from trainer.weights import digests, file_sums

SCHEDULE = ("train.steps", "optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.decay")
OF_BASE = ("digest", "precision", "mtp")
# Megatron-Bridge's names in run_config.yaml, by ours.
IN_BRIDGE: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def record(run: Run) -> dict[str, Any]:
    """Description of this training, for the marks of its checkpoints."""
    record = {"version": identity.VERSION, "keys": identity.recorded(run), "base": _base(run), "tokens": _tokens(run)}
    facts = {"magnitudes": "whole", "shared_adapters": "once", "auxiliary_losses": _auxiliary_losses(run)}
    return record | facts


def verify(folder: Path) -> None:
    """Compare the files of the newest checkpoint with their checksums; hosts of a gang share the work.

    A checkpoint with a changed file loses its mark. A gang's attempt then ends with a Fault, because all of its hosts
    must resume from the same step; otherwise this training resumes from the checkpoint before.
    """
    if entry.OWNED in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":  # another process of this host does it
        return
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    node = int(os.environ.get("RANK", "0")) // local
    while steps := checkpoints.complete_steps(folder):
        place = checkpoints.step_folder(folder, steps[-1])
        if not (names := file_sums.changed(place, node, world // local)):
            return
        (place / checkpoints.MARK).unlink(missing_ok=True)
        text = f"{place / names[0]}: has changed since the checkpoint was written"
        text += f", and {len(names) - 1} more files" if len(names) > 1 else ""
        text += f"; training resumes from step {steps[-2]}" if len(steps) > 1 else "; training begins again"
        if "RANK" in os.environ:
            raise Fault(text)
        say(f"train: {text}")


def check(run: Run, folder: Path) -> None:
    """Raise a Fault with a line for each key that differs from the newest checkpoint's and must not."""
    if (newest := _newest(folder)) is None:
        return
    place, was = newest
    versions = []
    if was.get("version", identity.VERSION) != identity.VERSION:
        versions.append(f"version {was['version']} of this program's training, and this is {identity.VERSION}")
    if was.get("auxiliary_losses", {}) != (losses := _auxiliary_losses(run)) and losses:
        versions.append("an earlier version of this program, whose losses of routers and of MTP layers differ")
    lines = [f"{place}: was trained by {text}; start again in another paths.output" for text in versions]
    ways = _ways_of_magnitudes(place) if run.adapter.kind == "dora" and was.get("magnitudes") != "whole" else 1
    if ways > 1 and "linear_fc1" in run.adapter.names:
        text = f"{place} has DoRA's magnitudes of linear_fc1 in the order of {ways} tensor-parallel ranks"
        lines.append(
            f"{text}, from which this version cannot resume; export it unchanged, or name another paths.output"
        )
    shared = run.adapter.experts == "shared" and run.moe.grouped_gemm
    if shared and was.get("shared_adapters") != "once" and _adapts_experts(place):
        text = f"{place} has a copy of the shared adapters for each expert, from which this version cannot resume"
        lines.append(f"{text}; export it unchanged, or name another paths.output")
    changes = identity.changed(was["keys"], identity.recorded(run))
    lines += [_line(key, *values, place) for key, values in changes.items() if not identity.may_change(key)]
    now = _base(run)
    for fact in OF_BASE:
        before = was.get("base", {}).get(fact)
        if before is not None and now[fact] is not None and before != now[fact]:
            text = f"{fact} {_short(now[fact])}, but {place} was trained on a base of {_short(before)}"
            lines.append(f"paths.base: {run.paths.base}: {text}; convert that base again, or name another paths.output")
    if lines:
        raise Fault("\n".join(lines))


def check_data(run: Run, folder: Path) -> None:
    newest = _newest(folder)
    before = newest[1].get("tokens") if newest else None
    if newest and before and before != _tokens(run):
        raise Fault(
            f"paths.data: {prepared.folder(run)}: {newest[0]} was trained on other tokens; prepare those again, "
            "or name another paths.output"
        )


def report_changes(run: Run, folder: Path) -> None:
    """Log the differences that are allowed, and the parts that could not be compared."""
    if (newest := _newest(folder)) is None:
        return
    place, was = newest
    if "tokens" not in was:
        keys = f"{len(was['keys'])} keys were compared with its run_config.yaml" if was["keys"] else "keys"
        say(f"train: {place} has no record of its training: {keys}, base and data could not be compared")
    changes = identity.changed(was["keys"], identity.recorded(run))
    shown = [f"{key} {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in changes.items()]
    if shown:
        say(f"train: resumes from {place.name} with {', '.join(shown)}")
    if not run.checkpoint.save_optimizer:
        say(f"train: resumes from {place.name} with a new optimizer, because checkpoint.save_optimizer is false")


def _newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint from which training would resume, and its record, or its entries in run_config.yaml."""
    steps = checkpoints.complete_steps(folder)
    if not steps:
        return None
    place = checkpoints.step_folder(folder, steps[-1])
    training = (checkpoints.read_mark(place) or {}).get("training")
    if training is None:
        return place, {"keys": _from_bridge(place / "run_config.yaml")}
    return place, training | {"keys": identity.completed(training["keys"])}


def _line(key: str, was: Any, now: Any, place: Path) -> str:
    text = f"{key}: {json.dumps(now)}, but {place} was trained with {json.dumps(was)}; set it back, or "
    if key in SCHEDULE:
        return text + "name another paths.output; to train its weights further, export them as that run's paths.model"
    return text + "name another paths.output"


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else json.dumps(value)


def _auxiliary_losses(run: Run) -> dict[str, Any]:
    """Auxiliary losses that are part of the identity; empty if the model's config.json is not on this host."""
    path = Path(run.paths.model) / config_json.NAME
    return auxiliary_losses.identity(run, config_json.read(path)) if path.is_file() else {}


def _base(run: Run) -> dict[str, Any]:
    mark = checkpoints.read_mark(Path(run.paths.base)) or {}
    return {fact: mark.get(fact) for fact in OF_BASE}


def _tokens(run: Run) -> str:
    """Digest of the token files that training reads. The .jsonl files of the same folder are for people only."""
    files = prepared.load(prepared.folder(run)).files
    blended = blend.FILE in files  # its .bin/.idx hold every split
    read = {name: state.sha256 for name, state in files.items() if blended or name.startswith("training.")}
    if blended:
        read = {name: sha256 for name, sha256 in read.items() if name == blend.FILE or indexed_files.are([Path(name)])}
    read = {name: sha256 for name, sha256 in read.items() if ".jsonl" not in name} or read
    return checksums.of_json(read)


def _from_bridge(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
        keys = {key: _at(config, bridge_key) for key, bridge_key in IN_BRIDGE.items()}
        peft, bf16 = config["peft"], config["optimizer"]["bf16"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return {}
    keys["train.precision"] = "bf16" if bf16 else "fp32"
    keys["adapter.kind"] = peft["_target_"].rpartition(".")[2].lower() if peft else "none"
    if peft and "share_expert_adapters" in peft:
        keys["adapter.experts"] = "shared" if peft["share_expert_adapters"] else "each"
    return {key: value for key, value in keys.items() if value is not None}


def _ways_of_magnitudes(place: Path) -> int:
    """Number of tensor-parallel ranks by which Megatron-Bridge orders the saved magnitudes of gates and ups."""
    try:
        model = yaml.safe_load((place / "run_config.yaml").read_text())["model"]
        return model["tensor_model_parallel_size"] if model["gated_linear_unit"] else 1
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 1


def _adapts_experts(place: Path) -> bool:
    names = (digests.read(place) or {"digests": {}})["digests"]
    return any(".experts." in name and ".adapter." in name for name in names)


def _at(config: dict[str, Any], path: str) -> Any:
    section, _, key = path.partition(".")
    return (config[section] or {}).get(key)
