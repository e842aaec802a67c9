"""Artifacts of stages, each found again by a fingerprint of everything that it was made from.

    <store>/<stage>/<fingerprint>/files/...         the artifact
                                 /artifact.json     its record, written last: without one there is no artifact
                                 /lease.json        who is making it now (tasks/run/lease.py)

The fingerprint is derived from the stage, the version of its code, the configuration that bears identity and the
fingerprints of its inputs. It is known before anything is made, and never depends on where the stage runs. A record
counts only while every file that it names is there with the content it had. A file that is missing or differs makes the
stage run again, and no other stage.
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from contract import checksums
from contract.faults import Fault
from tasks.run import lease
from tasks.run.progress import Progress
from tasks.store import File, Store
from tasks.store.folder import PARTIAL, walk

RECORD = "artifact.json"


@dataclass(frozen=True)
class Stage:
    """A stage that is asked for, with everything that its artifact depends on."""

    name: str
    version: int  # raised when the stage's code would make something else of the same
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # fingerprints, by the name that the stage has for them

    @property
    def fingerprint(self) -> str:
        return checksums.of(canonical(asdict(self)))[:16]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.fingerprint}"


@dataclass(frozen=True)
class Artifact:
    """An artifact that is in the store, as its record says."""

    stage: Stage
    files: dict[str, File]
    result: dict[str, Any]  # what the stage found out, small
    made: dict[str, Any]  # when, in how many seconds, by which flow run, with what
    cached: bool = False

    @property
    def key(self) -> str:
        return self.stage.key

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of the content. Two artifacts made from the same inputs may still differ in it."""
        lines = [f"{name} {file.sha256}\n" for name, file in sorted(self.files.items())]
        return checksums.of("".join(lines))[:16]


@dataclass(frozen=True)
class Missing:
    """The reason why there is no artifact that could be used."""

    reason: str


@dataclass(frozen=True)
class Work:
    """A folder in which a stage makes something, and the lease on the work. A later attempt finds the folder again."""

    folder: Path
    lease: lease.Lease
    say: Callable[[str], None]


def canonical(value: Any) -> str:
    """The one JSON text of a value. Refuses a value that has none."""
    for place, item in _leaves(value, ""):
        if not (item is None or isinstance(item, str | bool | int | float | dict | list | tuple)):  # empty ones
            raise TypeError(f"{place}: a {type(item).__name__} has no place in a fingerprint")
        if isinstance(item, float) and not math.isfinite(item):
            raise TypeError(f"{place}: {item} has no place in a fingerprint")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def find(stage: Stage, store: Store, deep: bool = False) -> Artifact | Missing:
    """The artifact, if it is there as recorded; else the reason why not."""
    artifact = read(store, stage.key)
    if artifact is None:
        return Missing("its record is damaged" if store.read(f"{stage.key}/{RECORD}") else _drift(stage, store))
    if changed := store.changed(f"{stage.key}/files", artifact.files, deep):
        name, what = next(iter(sorted(changed.items())))
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        return Missing(f"{name}: {what}{more}")
    return replace(artifact, cached=True)


def get_or_make(
    stage: Stage,
    store: Store,
    make: Callable[[Work], dict[str, Any]],
    work: Path,
    say: Callable[[str], None],
    made: dict[str, Any],
    make_again: bool = False,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Return the artifact from the store, or make it by make(Work), which fills Work.folder and returns the result."""
    asked = time.time()
    if not make_again and isinstance(found := find(stage, store), Artifact):
        return found
    with lease.hold(store, f"{stage.key}/lease.json", say, str(made.get("flow", "")), stop) as held:
        found = find(stage, store)
        if isinstance(found, Artifact) and (not make_again or found.made["at"] > asked):
            return found  # somebody else has made it while this one waited
        say(f"{stage.key}: {found.reason if isinstance(found, Missing) else 'made anew, as asked for'}")
        folder = work / stage.key.replace("/", "-")
        if store.remove(f"{stage.key}/{RECORD}"):  # its maker was done: what lies here is no attempt to go on with
            shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True, exist_ok=True)
        start = time.time()
        result = make(Work(folder, held, say))
        seconds = time.time() - start
        held.confirm()
        files = store.put(folder / "files", f"{stage.key}/files", _while_held(held, progress))
        if not files:
            raise Fault(f"{stage.key}: made nothing")
        held.confirm()
        made = made | {
            "at": time.time(),
            "seconds": round(seconds, 3),
            "stored_in": round(time.time() - start - seconds, 3),
        }
        artifact = Artifact(stage, files, result, made)
        if store.create(f"{stage.key}/{RECORD}", _encode(artifact)) is None:
            held.confirm()  # either this one has lost the work, or another did and did not know
            store.write(f"{stage.key}/{RECORD}", _encode(artifact))
        shutil.rmtree(folder)
    return artifact


def read(store: Store, key: str) -> Artifact | None:
    """The record at <stage>/<fingerprint>, whether or not its files are there. None if it is damaged."""
    found = store.read(f"{key}/{RECORD}")
    if found is None:
        return None
    try:
        record = json.loads(found[0])
        files = {name: File(**file) for name, file in record["files"].items()}
        artifact = Artifact(Stage(**record["stage"]), files, dict(record["result"]), dict(record["made"]))
        whole = (artifact.key, artifact.digest) == (key, record["digest"]) and {"at", "seconds"} <= {*artifact.made}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return artifact if whole else None


def every(store: Store, stage: str = "") -> Iterator[Artifact]:
    """All records of a stage, or of all stages."""
    for key in sorted(store.keys(stage)):
        path = f"{stage}/{key}" if stage else key
        if path.count("/") == 2 and path.endswith(f"/{RECORD}") and (artifact := read(store, path[: -len(RECORD) - 1])):
            yield artifact


def local(artifact: Artifact, store: Store, cache: Path) -> Path:
    """A folder of this host that holds the artifact's files: the store's own, or a copy in the cache."""
    if place := store.place(f"{artifact.key}/files"):
        return place
    folder = cache / artifact.key.replace("/", "-")
    stamps, known = folder.with_name(f"{folder.name}.json"), None
    with contextlib.suppress(OSError, ValueError):  # half written by a process that was killed
        known = json.loads(stamps.read_text())
    if known != {"digest": artifact.digest, "files": _stamps(folder, artifact)}:
        store.get(f"{artifact.key}/files", artifact.files, folder, Progress("fetch", "bytes").update)
        for name, path in walk(folder).items():
            if name not in artifact.files and not name.startswith(f"{PARTIAL}/"):  # of what lay here before
                path.unlink()
        stamps.write_text(json.dumps({"digest": artifact.digest, "files": _stamps(folder, artifact)}))
    return folder


def nearest(stage: Stage, store: Store) -> Artifact | None:
    """The artifact of this stage that was made from the most similar inputs, the newest of several."""
    return most_similar([artifact for artifact in every(store, stage.name) if artifact.key != stage.key], stage)


def most_similar(others: Iterable[Artifact], stage: Stage) -> Artifact | None:
    """The one that differs least from the stage, the newest of several."""
    return min(others, key=lambda a: (len(differences(a.stage, stage)), -a.made.get("at", 0)), default=None)


def differences(was: Stage, now: Stage) -> list[str]:
    """Differences, field by field: `optimizer.lr: 0.001 -> 0.002`."""
    before, after = dict(_leaves(_identity(was), "")), dict(_leaves(_identity(now), ""))
    shown = [(key, _show(before, key), _show(after, key)) for key in sorted({*before, *after})]
    return [f"{key}: {was} -> {now}" for key, was, now in shown if was != now]


def _drift(stage: Stage, store: Store) -> str:
    other = nearest(stage, store)
    if other is None:
        return f"no {stage.name} was made yet"
    changes = differences(other.stage, stage)
    shown = "; ".join(changes[:4]) + (f" and {len(changes) - 4} more" if len(changes) > 4 else "")
    return f"differs from {other.key}: {shown}"


def _identity(stage: Stage) -> dict[str, Any]:
    return {"code version": stage.version, **stage.config, **{f"input {name}": fp for name, fp in stage.inputs.items()}}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: the key {key!r} is no text")
            yield from _leaves(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]")
    else:
        yield place, value


def _show(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _while_held(held: lease.Lease, progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """Wrap progress so that it ends a transfer that would write over what another process makes by now."""

    def update(done: int, total: int) -> None:
        held.confirm()
        if progress:
            progress(done, total)

    return update


def _stamps(folder: Path, artifact: Artifact) -> dict[str, list[int] | None]:
    stamps: dict[str, list[int] | None] = {}
    for name in artifact.files:
        path = folder / name
        status = path.stat() if path.is_file() else None
        stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns] if status else None
    return stamps


def _encode(artifact: Artifact) -> bytes:
    record = {"stage": asdict(artifact.stage), "digest": artifact.digest, "result": artifact.result}
    files = {name: asdict(file) for name, file in artifact.files.items()}
    return json.dumps(record | {"made": artifact.made, "files": files}, indent=1).encode()
