"""Identity of artifacts from a run's keys, by the declaration of each key (conf/schema/bearing.py).

The stages in tasks/stages/ include of() in the fingerprints of their artifacts, and add values that they derive from
keys: the content of files, a commit. A checkpoint contains recorded() of the run that saved it, and
trainer/training/resume.py compares that with the run that resumes from it.

The layout and the micro batch do not count: losses are the same at every layout (docs/reference/layouts.md), except
with dropout, which draws other numbers from the same distribution. Recomputation, kernels and logging do not count
either. The interval of checkpoints counts if the best one is kept (tasks/stages/train.py).
"""

from typing import Any

from conf.schema import bearing
from conf.schema.bearing import Bearing, Stage
from conf.schema.run import Run, sections
from conf.schema.sections import Section

VERSION = 1  # of training: raised when a change of the code changes the result of the same keys

# Sections of which a checkpoint records all keys, for readers. Of others it records only held keys.
RECORDED = {"adapter", "layout", "train", "optimizer", "moe", "checkpoint"}


def of(run: Run, stage: Stage) -> dict[str, dict[str, Any]]:
    """Values of the keys that count for the stage, by section and key."""
    identity = {name: of_section(getattr(run, name), stage) for name in sections()}
    return {name: values for name, values in identity.items() if values}


def flat(run: Run, stage: Stage) -> dict[str, Any]:
    """Values of the keys that count for the stage, by key without its section."""
    identity: dict[str, Any] = {}
    for values in of(run, stage).values():
        assert not identity.keys() & values.keys(), f"two sections have the keys {identity.keys() & values.keys()}"
        identity |= values
    return identity


def of_section(section: Section, stage: Stage) -> dict[str, Any]:
    """Values of the keys of one section, or of one source of data, that count for the stage."""
    declared = {key: bearing.of(field) for key, field in type(section).model_fields.items()}
    values = section.model_dump(mode="json", include={key for key, of in declared.items() if stage in of.stages})
    return {key: value for key, value in values.items() if value != declared[key].absent}


def recorded(run: Run) -> dict[str, Any]:
    """The record, by dotted key, of the run in its checkpoints."""
    values = run.model_dump(mode="json")
    return {key: values[section][name] for key in _recorded() for section, name in [key.split(".")]}


def completed(record: dict[str, Any]) -> dict[str, Any]:
    """A record of an earlier version, completed with the `absent` values of later keys."""
    return {key: declared.absent for key, declared in _recorded().items() if declared.pinned} | record


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that both records have with different values; the values before and now."""
    untrained = before.get("adapter.kind") == now["adapter.kind"] == "none"  # the other keys then have no effect
    pairs = {key: (before[key], value) for key, value in now.items() if key in before}
    return {
        key: (was, value)
        for key, (was, value) in pairs.items()
        if _plain(was) != _plain(value) and not (untrained and key.startswith("adapter."))
    }


def may_change(key: str) -> bool:
    """Whether a run may resume from a checkpoint that was saved with another value."""
    section, _, name = key.partition(".")
    return not bearing.of(sections()[section].model_fields[name]).held


def _recorded() -> dict[str, Bearing]:
    declared = {
        f"{section}.{key}": bearing.of(field)
        for section, kind in sections().items()
        for key, field in kind.model_fields.items()
    }
    return {key: of for key, of in declared.items() if key.partition(".")[0] in RECORDED or of.held}


def _plain(value: Any) -> Any:
    """A value in plain types. The targets of an adapter are sorted, as their order has no meaning."""
    return sorted(value) if isinstance(value, list | tuple) else value
