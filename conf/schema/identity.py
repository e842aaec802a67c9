"""Identity of artifacts, as far as a run's keys say it: computed from what each key declares.

The stages in tasks/stages/ take of() into the fingerprint of what they make, and add what they derive from keys: the
content of files, a commit. A checkpoint keeps recorded() of the run that saved it, and trainer/training/resume.py
compares that with the run that goes on from it.

The layout and the micro batch bear no identity: losses are the same at every layout (docs/reference/layouts.md), except
for dropout, which draws other numbers from the same distribution. Neither do recomputation, kernels and logging. How
often a checkpoint is saved counts if the best one is kept (tasks/stages/train.py).
"""

from typing import Any

from conf.schema import bearing
from conf.schema.bearing import Bearing, Stage
from conf.schema.run import Run, sections
from conf.schema.sections import Section

VERSION = 1  # of training: raised when the same keys would train something else

# Sections of which a checkpoint records all keys, for people to read. Of others it records what is held.
RECORDED = {"adapter", "layout", "train", "optimizer", "moe", "checkpoint"}


def of(run: Run, stage: Stage) -> dict[str, dict[str, Any]]:
    """Values of the keys that bear on the stage, by section and key."""
    found = {name: of_section(getattr(run, name), stage) for name in sections()}
    return {name: values for name, values in found.items() if values}


def flat(run: Run, stage: Stage) -> dict[str, Any]:
    """Values of the keys that bear on the stage, by key alone."""
    found: dict[str, Any] = {}
    for values in of(run, stage).values():
        assert not found.keys() & values.keys(), f"two sections have the keys {found.keys() & values.keys()}"
        found |= values
    return found


def of_section(section: Section, stage: Stage) -> dict[str, Any]:
    """Values of the keys of one section, or of one source of data, that bear on the stage."""
    declared = {key: bearing.of(field) for key, field in type(section).model_fields.items()}
    values = section.model_dump(mode="json", include={key for key, one in declared.items() if stage in one.stages})
    return {key: value for key, value in values.items() if value != declared[key].absent}


def recorded(run: Run) -> dict[str, Any]:
    """The record, by dotted key, that a checkpoint keeps of the run that saved it."""
    found = run.model_dump(mode="json")
    return {key: found[section][name] for key in _recorded() for section, name in [key.split(".")]}


def completed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the keys that came after it. A key that was not there yet was at its `absent` value."""
    return {key: one.absent for key, one in _recorded().items() if one.pinned} | record


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
    return not bearing.of(sections()[section].model_fields[name]).held


def _recorded() -> dict[str, Bearing]:
    declared = {
        f"{section}.{key}": bearing.of(field)
        for section, kind in sections().items()
        for key, field in kind.model_fields.items()
    }
    return {key: one for key, one in declared.items() if key.partition(".")[0] in RECORDED or one.held}


def _plain(value: Any) -> Any:
    """A value in plain types. The targets of an adapter are sorted, as their order has no meaning."""
    return sorted(value) if isinstance(value, list | tuple) else value
