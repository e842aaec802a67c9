"""Identity of a training: the keys that decide which weights come out.

tasks/stages/train.py takes of_training() into the fingerprint of what it makes. A checkpoint keeps recorded() of the
run that saved it, and trainer/training/resume.py compares that with the run that goes on from it.

The layout bears no identity: losses are the same at every layout (README, Layouts). Neither do recomputation, kernels,
logging, and how often a checkpoint is saved.
"""

from typing import Any

from conf.schema.run import Run, sections
from conf.schema.sections import Section

VERSION = 1  # raised when the same keys would train something else

BEARING = {
    "model": {"mtp", "mtp_loss_scale"},
    "data": {"seq_length", "packed", "seed"},  # the rest is in the data's own identity
    "train": {"steps", "global_batch", "seed", "precision", "validate_every", "validate_batches", "stop_after"}
    | {"fp8", "fp8_weights"},
    "moe": {"aux_loss_coeff", "z_loss_coeff", "router_dtype", "freeze_router", "balance", "force_balance"},
    "checkpoint": {"save_optimizer", "keep"},
    "evaluate": {"parity_rows"},  # training writes down what it says of them
}
WHOLE = {"adapter", "optimizer"}  # sections all of whose keys bear it, but for these two, which say where things lie:
OF_MEMORY = {"distributed", "offload"}
# Keys that came when there were artifacts already: by themselves they say what a run without them did.
YOUNGER = {("train", "fp8"), ("train", "fp8_weights"), ("optimizer", "states"), ("optimizer", "gradients")}

# They bear on which files come out, and not on the weights of a step: a resume may change them. It may not change those
# OF_MEMORY, because Megatron does not read the state of one kind of optimizer into another.
OF_FILES = {"train.stop_after", "train.validate_every", "train.validate_batches", "checkpoint.keep"}
# What a checkpoint records: besides what bears identity, how it was computed, for people to read.
SECTIONS = {"adapter", "layout", "train", "optimizer", "moe", "checkpoint"}


def of_training(run: Run) -> dict[str, Any]:
    config = run.model_dump(mode="json", include=BEARING)
    config |= run.model_dump(mode="json", include=WHOLE)
    for key in OF_MEMORY:
        del config["optimizer"][key]
    for section, key in YOUNGER:
        if config[section][key] == _default(section, key):
            del config[section][key]
    if run.adapter.kind != "none" and run.adapter.experts == "shared":
        # They are the same model at any ep since each counts once in the norm of gradients
        # (trainer/patches/shared_experts.py). Those of before were so at ep 1 alone, whose artifacts this finds again.
        config["layout"] = {"ep": 1}
    return config


def recorded(run: Run) -> dict[str, Any]:
    """The record, by dotted key, that a checkpoint keeps of the run that saved it."""
    found = run.model_dump(mode="json")
    return {key: found[section][name] for key in _keys() for section, name in [key.split(".")]}


def completed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the keys that came after it. A key that was not there yet was at its default."""
    return {key: _default(*key.split(".")) for key in _keys()} | record


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that both records have with different values; the values before and now."""
    untrained = before.get("adapter.kind") == now["adapter.kind"] == "none"  # an adapter's other keys say nothing then
    pairs = {key: (before[key], value) for key, value in now.items() if key in before}
    return {
        key: (was, value)
        for key, (was, value) in pairs.items()
        if _plain(was) != _plain(value) and not (untrained and key.startswith("adapter."))
    }


def may_change(key: str) -> bool:
    """Whether a run may go on from a checkpoint that was saved with another value."""
    section, _, name = key.partition(".")
    return key in OF_FILES or not (section in WHOLE or name in BEARING.get(section, ()))


def _keys() -> list[str]:
    keys = [f"{section}.{key}" for section in sorted(SECTIONS) for key in _kind(section).model_fields]
    return keys + [f"{section}.{key}" for section in ("model", "data") for key in sorted(BEARING[section])]


def _default(section: str, key: str) -> Any:
    return _kind(section).model_fields[key].default


def _kind(section: str) -> type[Section]:
    return sections()[section]


def _plain(value: Any) -> Any:
    """A value in plain types. The targets of an adapter are sorted, as their order has no meaning."""
    return sorted(value) if isinstance(value, list | tuple) else value
