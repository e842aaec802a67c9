"""Artifacts of stages, each identified by a fingerprint of all its inputs.

    <store>/<stage>/<fingerprint>/files/...         the artifact
                                 /artifact.json     its record, written last: without a record there is no artifact
                                 /lease.json        the process that makes it (tasks/run/lease.py)

The fingerprint is derived from the stage, the version of its code, its identity keys of the configuration and the
fingerprints of its inputs. It is known before the stage runs, and is the same on every host. A record is valid only
while all its files exist with their recorded content. If one is missing or differs, this stage runs again, and no other
stage.
"""

import json
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from contract import checksums, json_object
from contract.faults import Fault
from tasks.run import lease
from tasks.run.progress import Progress
from tasks.store import File, Store
from tasks.store.durable import tag_of
from tasks.store.folder import PARTIAL, walk

RECORD = "artifact.json"
SHOWN = 4  # differences in a line


@dataclass(frozen=True)
class Stage:
    """A requested stage, with everything that its artifact depends on."""

    name: str
    version: int  # increased when a change of the stage's code changes its artifacts
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)  # fingerprints by the names of the inputs

    @property
    def fingerprint(self) -> str:
        return checksums.of(canonical(asdict(self)))[:16]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.fingerprint}"


@dataclass(frozen=True)
class Artifact:
    """An artifact in the store, by its record."""

    stage: Stage
    files: dict[str, File]
    result: dict[str, Any]  # small results of the stage, such as counts and metrics
    made: dict[str, Any]  # time, seconds, flow run, versions
    cached: bool = False

    @property
    def key(self) -> str:
        return self.stage.key

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of the content. It may differ between two artifacts of the same inputs."""
        lines = [f"{name} {file.sha256}\n" for name, file in sorted(self.files.items())]
        return checksums.of("".join(lines))[:16]


@dataclass(frozen=True)
class Missing:
    """The reason why no valid artifact exists."""

    reason: str


@dataclass(frozen=True)
class Work:
    """A folder in which a stage works, and the lease on the work. A later attempt gets the same folder."""

    folder: Path
    lease: lease.Lease
    say: Callable[[str], None]
    again: bool = False  # the artifact was complete once: nothing of its work can be continued
    stored: dict[str, File] = field(default_factory=dict)  # files that hosts have put in place in the store

    @property
    def files(self) -> Path:
        """The folder whose content becomes the artifact."""
        return self.folder / "files"


def canonical(value: Any) -> str:
    """Return the unique JSON text of a value. Raise TypeError for a value without one."""
    for place, item in _leaves(value, ""):
        if not (item is None or isinstance(item, str | bool | int | float | dict | list | tuple)):  # empty ones
            raise TypeError(f"{place}: a {type(item).__name__} has no place in a fingerprint")
        if isinstance(item, float) and not math.isfinite(item):
            raise TypeError(f"{place}: {item} has no place in a fingerprint")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def find(stage: Stage, store: Store, deep: bool = False) -> Artifact | Missing:
    """Return the artifact if it is stored as recorded, else the reason why not."""
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
    requested = time.time()
    if not make_again and isinstance(stored := find(stage, store), Artifact):
        return stored
    with lease.hold(store, f"{stage.key}/lease.json", say, str(made.get("flow", "")), stop) as held:
        stored = find(stage, store)
        if isinstance(stored, Artifact) and (not make_again or stored.made["at"] > requested):
            return stored  # another process has made it meanwhile
        say(f"{stage.key}: {stored.reason if isinstance(stored, Missing) else 'made again, as requested'}")
        folder = work / stage.key.replace("/", "-")
        if again := store.remove(f"{stage.key}/{RECORD}"):  # a finished attempt: its folder cannot be continued
            shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True, exist_ok=True)
        start = time.time()
        making = Work(folder, held, say, again)
        result = make(making)
        seconds = time.time() - start
        held.confirm()

        def update(done: int, total: int) -> None:
            held.confirm()  # ends the transfer if another process has taken over the work
            if progress:
                progress(done, total)

        made_files = store.put(folder / "files", f"{stage.key}/files", update, making.stored.__contains__)
        files = making.stored | made_files
        if not files:
            raise Fault(f"{stage.key}: the stage wrote no files")
        held.confirm()
        made = made | {
            "at": time.time(),
            "seconds": round(seconds, 3),
            "stored_in": round(time.time() - start - seconds, 3),
        }
        artifact = Artifact(stage, files, result, made)
        if store.create(f"{stage.key}/{RECORD}", _encode(artifact)) is None:
            held.confirm()  # fails if this process lost the lease; otherwise another process wrote without a lease
            store.write(f"{stage.key}/{RECORD}", _encode(artifact))
        shutil.rmtree(folder)
    return artifact


def read(store: Store, key: str) -> Artifact | None:
    """Return the record at <stage>/<fingerprint> without checking its files; None if it is missing or damaged."""
    entry = store.read(f"{key}/{RECORD}")
    if entry is None:
        return None
    try:
        record = json.loads(entry[0])
        files = {name: File(**file) for name, file in record["files"].items()}
        artifact = Artifact(Stage(**record["stage"]), files, dict(record["result"]), dict(record["made"]))
        whole = (artifact.key, artifact.digest) == (key, record["digest"]) and {"at", "seconds"} <= {*artifact.made}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return artifact if whole else None


def every(store: Store, stage: str = "") -> Iterator[Artifact]:
    """Yield all records of a stage, or of all stages."""
    for key in sorted(store.keys(stage)):
        path = f"{stage}/{key}" if stage else key
        if path.count("/") == 2 and path.endswith(f"/{RECORD}") and (artifact := read(store, path[: -len(RECORD) - 1])):
            yield artifact


def by_fingerprint(store: Store) -> dict[str, Artifact]:
    """Return all records of the store by fingerprint."""
    return {artifact.stage.fingerprint: artifact for artifact in every(store)}


def sources(stage: Stage, known: dict[str, Artifact]) -> Iterator[Artifact]:
    """Yield direct and indirect inputs of a stage, the nearest first. `known` has artifacts by fingerprint."""
    pending, seen = deque(stage.inputs.values()), set[str]()
    while pending:
        fingerprint = pending.popleft()
        if fingerprint in known and fingerprint not in seen:
            seen.add(fingerprint)
            yield known[fingerprint]
            pending += known[fingerprint].stage.inputs.values()


def local(artifact: Artifact, store: Store, cache: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return a folder on this host with the artifact's files: the store's folder, or a copy in the cache."""
    if place := store.place(f"{artifact.key}/files"):
        return place
    folder = cache / artifact.key.replace("/", "-")
    stamps = folder.with_name(f"{folder.name}.json")
    if json_object.read_or_empty(stamps) != {"digest": artifact.digest, "files": _tags(folder, artifact)}:
        store.get(f"{artifact.key}/files", artifact.files, folder, progress or Progress("fetch", "bytes").update)
        for name, path in walk(folder).items():
            if name not in artifact.files and not name.startswith(f"{PARTIAL}/"):  # files of an earlier copy
                path.unlink()
        stamps.write_text(json.dumps({"digest": artifact.digest, "files": _tags(folder, artifact)}))
    return folder


def nearest(stage: Stage, store: Store) -> Artifact | None:
    """Return the artifact of this stage with the most similar inputs; the newest if several are equally similar."""
    return most_similar([artifact for artifact in every(store, stage.name) if artifact.key != stage.key], stage)


def most_similar(others: Iterable[Artifact], stage: Stage) -> Artifact | None:
    """Return the artifact that differs least from the stage; the newest if several are equally similar."""
    return min(others, key=lambda a: (len(differences(a.stage, stage)), -a.made.get("at", 0)), default=None)


def differences(was: Stage, now: Stage) -> list[str]:
    """List the differences field by field: `optimizer.lr: 0.001 -> 0.002`."""
    before, after = dict(_leaves(_identity(was), "")), dict(_leaves(_identity(now), ""))
    shown = [(key, _show(before, key), _show(after, key)) for key in sorted({*before, *after})]
    return [f"{key}: {was} -> {now}" for key, was, now in shown if was != now]


def brief(changes: list[str]) -> str:
    """Return the first differences in one line, and the number of the others."""
    return "; ".join(changes[:SHOWN]) + (f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")


def _drift(stage: Stage, store: Store) -> str:
    other = nearest(stage, store)
    if other is None:
        return f"no {stage.name} exists yet"
    return f"differs from {other.key}: {brief(differences(other.stage, stage))}"


def _identity(stage: Stage) -> dict[str, Any]:
    return {"code version": stage.version, **stage.config, **{f"input {name}": fp for name, fp in stage.inputs.items()}}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: the key {key!r} is not a text")
            yield from _leaves(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]")
    else:
        yield place, value


def _show(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _tags(folder: Path, artifact: Artifact) -> dict[str, str | None]:
    paths = {name: folder / name for name in artifact.files}
    return {name: tag_of(path.stat()) if path.is_file() else None for name, path in paths.items()}


def _encode(artifact: Artifact) -> bytes:
    record = {"stage": asdict(artifact.stage), "digest": artifact.digest, "result": artifact.result}
    files = {name: asdict(file) for name, file in artifact.files.items()}
    return json.dumps(record | {"made": artifact.made, "files": files}, indent=1).encode()
