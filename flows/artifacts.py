"""List, show, verify and delete artifacts of the store.

    python -m flows.artifacts list [STAGE]                 with configuration, score, and changes since the last one
    python -m flows.artifacts show STAGE/FINGERPRINT       its record, its inputs, and the artifacts made from it
    python -m flows.artifacts verify                       read every byte of all artifacts
    python -m flows.artifacts verify STAGE/FINGERPRINT...  only these; a base or an export also against the release
    python -m flows.artifacts gc [--days N] [--delete]     list artifacts that no run needs; --delete removes them

The beginning of a fingerprint is enough.

verify ends with exit code 1 if a byte differs. A named base (convert) or export is also compared with the release,
weight by weight (trainer/proof/): unchanged weights bit by bit, trained ones are computed again from base and adapter.
Exit code 2: nothing can be compared, for example because the inputs were deleted.

gc keeps an artifact if a run refers to it, if it is an input of a kept one, or if a version in MLflow's registry uses
it. With --days, your runs that began longer ago do not count, unless they run or the store has a later checkpoint, from
which they can resume. Logs of a gang (python -m flows.logs) are removed with its
training, or --days after it was complete. Files that no stage has written stay.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conf.load import dump, load
from contract import closed_pipe
from contract.amounts import clock, size
from contract.faults import Fault
from contract.processes import end_with_parent
from flows import arguments
from flows.pipeline import PIPELINE
from tasks.gang.copies import Copies
from tasks.gang.history import timeline
from tasks.run import accounts, artifact, launch, lease
from tasks.run.artifact import Artifact, Missing, Stage
from tasks.run.places import open_run_store, runs_folder
from tasks.store import Store

OWN = ("runs", "pins", "gangs")  # folders of the store that hold no artifacts
STAGES = sorted({name.partition("-")[0] for name in PIPELINE.names})
PLACE = re.compile(rf"({'|'.join(STAGES)})/[0-9a-f]{{16}}")
GANG = re.compile(r"train-[0-9a-f]{16}")
DAY = 86400.0  # seconds
# The stages that a proof reads, for each key of `paths`. The proof uses the last of them that exists.
OF_BASE = {"model": ("download",), "base": ("convert",)}
PLACES = {"base": OF_BASE, "export": OF_BASE | {"output": ("train", "reinforce"), "export": ("export",)}}


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.artifacts().parse_args(argv)
    store = open_run_store()
    if options.do == "list":
        return show_all(store, options.stage or "", options.owner, options.project)
    if options.do == "show":
        return show(store, _one(store, options.key))
    if options.do == "gc":
        return collect(store, options.days, options.delete, options.all_owners)
    if options.keys:
        named = [_one(store, key) for key in options.keys]
        return max(verify(store, named), *(prove(store, made) for made in named))
    several = list(artifact.every(store))
    records = {name.rpartition("/")[0] for name in store.keys("") if name.endswith(f"/{artifact.RECORD}")}
    return verify(store, several, sorted(records - {made.key for made in several}))


def show_all(store: Store, stage: str, owner: str | None = None, project: str | None = None) -> int:
    if stage and stage not in STAGES:
        near = get_close_matches(stage.partition("-")[0], STAGES, n=1)
        raise Fault(f"{stage}: not a stage; " + (f"did you mean {near[0]}?" if near else ", ".join(STAGES)))
    found = sorted(artifact.every(store, stage), key=lambda made: made.made["at"])
    if owner or project:
        runs = [_note(store, f"runs/{name}") for name in store.keys("runs")]
        theirs = [run for run in runs if owner in (None, run["owner"]) and project in (None, run["project"])]
        keys = {key for run in theirs for key in run["artifacts"]}
        found = [made for made in found if made.key in keys]
    everything = artifact.by_fingerprint(store)
    before: dict[tuple[str, ...], Artifact] = {}
    width = max((len(_conf(made)) for made in found), default=0)
    for made in found:
        when = datetime.fromtimestamp(made.made["at"]).strftime("%Y-%m-%d %H:%M")
        spent = f"{size(made.size):>9}  {clock(made.made['seconds']):>8}"
        told = "  ".join(filter(None, (_conf(made).ljust(width), _score(made), f"by {made.made.get('flow', '')}")))
        print(f"{when}  {made.key:<28}  {spent}  {told}")
        kind = (made.stage.name, _conf(made), *sorted(made.stage.inputs))  # the base is evaluated without a training
        if kind in before:
            changes = artifact.brief(_changes(before[kind].stage, made.stage, everything))
            print(f"{' ' * len(when)}  {changes or 'no changes'}")
        before[kind] = made
    print(f"{len(found)} artifacts, {size(sum(made.size for made in found))}, in {store.uri}")
    gangs = _gangs(store.keys("gangs")) if stage in ("", "train") else None
    if gangs:
        print(f"{len(gangs)} gangs' boards and logs, {size(gangs.total())}; python -m flows.logs lists them")
    return 0


def _conf(made: Artifact) -> str:
    """Return the name of the configuration that the artifact was first made for."""
    return str(made.made.get("run", ""))


def _score(made: Artifact) -> str:
    """The most important figures of the artifact."""
    result = made.result
    metrics = result.get("metrics")
    if isinstance(metrics, dict):
        told = [(name, value) for name, value in metrics.items() if not name.endswith("_stderr")][:1]
    elif made.stage.name == "promote":
        return f"version {result.get('version')}, {' and '.join(result.get('aliases', ()))}"
    else:
        named = {"loss": "loss", "validation_loss": "validation"}
        named |= {"reward": "reward", "held_out_before": "held out before", "held_out_after": "after"}
        told = [(name, result[key]) for key, name in named.items() if key in result]
    return ", ".join(f"{name} {value:.4g}" for name, value in told)


def _changes(was: Stage, now: Stage, everything: dict[str, Artifact]) -> list[str]:
    """List the differences between the configurations of two stages and of their inputs."""
    found = [line for line in artifact.differences(was, now) if not line.startswith("input ")]
    for name in {**was.inputs, **now.inputs}:
        old, new = was.inputs.get(name), now.inputs.get(name)
        if old != new:
            sources = everything.get(old or ""), everything.get(new or "")
            inner = _changes(sources[0].stage, sources[1].stage, everything) if sources[0] and sources[1] else []
            found += inner or [f"another {name}"]
    return [*dict.fromkeys(found)]


def show(store: Store, made: Artifact) -> int:
    everything = artifact.by_fingerprint(store)
    print(f"{made.key}  content {made.digest}  {store.link(made.key + '/files')}")
    print(f"\nmade from\n{_tree(made, everything, 1)}")
    uses = [o for o in everything.values() if made.stage.fingerprint in o.stage.inputs.values()]
    print("used by\n" + ("".join(f"  {other.key}\n" for other in uses) or "  nothing\n"))
    print(json.dumps({"config": made.stage.config, "result": made.result, "made": made.made}, indent=2))
    print(f"\n{len(made.files)} files, {size(made.size)}")
    for name, file in sorted(made.files.items()):
        print(f"  {file.sha256[:16]}  {size(file.size):>9}  {name}")
    return 0


def verify(store: Store, several: list[Artifact], damaged: Sequence[str] = ()) -> int:
    bad = len(damaged)
    for made in several:
        found = artifact.find(made.stage, store, deep=True)
        bad += isinstance(found, Missing)
        print(f"{made.key}  {found.reason if isinstance(found, Missing) else f'{len(made.files)} files as recorded'}")
    for key in damaged:
        print(f"{key}  its record is damaged")
    count = len(several) + len(damaged)
    print(f"{bad} of {count} damaged; the next run that needs one makes it again" if bad else "all as recorded")
    return int(bool(bad))


def prove(store: Store, made: Artifact) -> int:
    """Prove a base or an export against the release, in a separate process. Other stages have no proof."""
    command = {"convert": "base", "export": "export"}.get(made.stage.name)
    if command is None:
        return 0
    chain = {made.stage.name: made}
    for source in artifact.sources(made.stage, artifact.by_fingerprint(store)):
        chain.setdefault(source.stage.name, source)  # if a stage occurs several times, use the nearest
    read = {name: [chain[stage] for stage in stages if stage in chain] for name, stages in PLACES[command].items()}
    if lost := [PLACES[command][name][0] for name, there in read.items() if not there]:
        raise Fault(f"{made.key}: its inputs are no longer in the store: {', '.join(lost)}")
    places = {name: artifact.local(there[-1], store, runs_folder() / "cache") for name, there in read.items()}
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        trusted = json.dumps(chain["download"].stage.config.get("trust_remote_code", False))
        paths = [f"paths.{name}={place}" for name, place in (places | {"logs": Path(folder) / "logs"}).items()]
        resolved = Path(folder) / "resolved.yaml"
        dump(load("tiny", [*paths, f"model.trust_remote_code={trusted}"]), resolved)  # artifacts record the rest
        return subprocess.run(
            [sys.executable, "-m", f"trainer.proof.{command}", str(resolved)],
            env=os.environ | {"PYTHONPATH": str(launch.ROOT)},
            preexec_fn=end_with_parent,
            check=False,
        ).returncode


def collect(store: Store, days: float | None, delete: bool, all_owners: bool = False) -> int:
    """Remove artifacts and logs that nothing refers to. Without `delete`, only list them.

    Old runs of other owners count, unless `all_owners` is set.
    """
    everything = {made.key: made for made in artifact.every(store)}
    there = store.keys("")
    paths = [name.split("/") for name in there]
    folders = {"/".join(path[:2]) for path in paths if len(path) > 2 and path[0] not in OWN}
    foreign = sorted(folder for folder in folders if not PLACE.fullmatch(folder))
    folders -= {*foreign}
    makers = {key: lease.holder(store, f"{key}/lease.json") for key in folders}
    making = {key for key, maker in makers.items() if maker}
    limit = None if days is None else time.time() - days * DAY
    gangs = _gangs({name.removeprefix("gangs/"): facts for name, facts in there.items() if name.startswith("gangs/")})
    old = [] if limit is None else _older_than(store, limit, making | _resumable(store, gangs, limit), all_owners)
    kept = _with_inputs(_referred_to(store, old), everything)
    freed = 0
    for key in sorted(folders - kept):
        if key in making:
            print(f"keeps {key}: {makers[key]} is making it")
            continue
        bytes_there = sum(length for length, _ in store.keys(key).values())
        freed += bytes_there
        print(f"{'removes' if delete else 'would remove'} {key}  {size(bytes_there)}")
        if delete:
            store.remove(f"{key}/{artifact.RECORD}")  # first: without its record the folder is not an artifact
            store.delete(f"{key}/files")
            store.remove(f"{key}/lease.json")
    if foreign:
        print(f"leaves {len(foreign)} folders that no stage has written, such as {foreign[0]}")
    for gang in sorted(gangs):
        training = gang.replace("-", "/", 1)
        made = everything.get(training)
        past = made is not None and limit is not None and made.made["at"] < limit
        if training in making or (training in kept and not past):
            continue
        freed += gangs[gang]
        print(f"{'removes' if delete else 'would remove'} gangs/{gang}  {size(gangs[gang])}")
        if delete:
            store.delete(f"gangs/{gang}")
            store.remove(f"{timeline.FOLDER}/{gang}.json")
    for run in old if delete else []:
        store.remove(f"runs/{run}")
    print(f"{size(freed)} {'freed' if delete else 'can be freed with --delete'}")
    return 0


def _referred_to(store: Store, old: list[str]) -> set[str]:
    """Return the keys of artifacts that were promoted, or that a run outside of `old` refers to."""
    found: set[str] = set()
    for folder, left_out in (("runs", old), ("pins", [])):
        for name in store.keys(folder):
            if name not in left_out:
                found |= {*_note(store, f"{folder}/{name}")["artifacts"]}
    return found


def _with_inputs(keys: set[str], everything: dict[str, Artifact]) -> set[str]:
    known = {made.stage.fingerprint: made for made in everything.values()}
    stages = [everything[key].stage for key in keys if key in everything]
    return keys | {source.key for stage in stages for source in artifact.sources(stage, known)}


def _older_than(store: Store, limit: float, active: set[str], all_owners: bool) -> list[str]:
    """Return old runs that are not active: a long training may still read inputs that are weeks old."""
    runs = {name: _note(store, f"runs/{name}") for name in store.keys("runs")}
    old = {name: run for name, run in runs.items() if run["started"] < limit and active.isdisjoint(run["artifacts"])}
    mine = (None, accounts.login())  # runs of earlier versions have no owner
    return [name for name, run in old.items() if all_owners or run["owner"] in mine]


def _resumable(store: Store, gangs: Iterable[str], limit: float) -> set[str]:
    """Return trainings whose newest checkpoint in the store is not older than the limit."""
    copies = {gang.replace("-", "/", 1): Copies(store, gang) for gang in gangs}
    return {training for training, copy in copies.items() if copy.at(copy.newest()) > limit}


def _gangs(listed: dict[str, tuple[int, str]]) -> Counter[str]:
    """Return the bytes of each gang below gangs/."""
    found: Counter[str] = Counter()
    for name, (length, _) in listed.items():
        folder, _, rest = name.partition("/")
        gang = rest.removesuffix(".json") if f"gangs/{folder}" == timeline.FOLDER else folder
        if GANG.fullmatch(gang):
            found[gang] += length
    return found


def _note(store: Store, key: str) -> dict[str, Any]:
    """Return the note of a run or a pin. A damaged note stops the removal, because it may refer to any artifact."""
    found = store.read(key)
    if found is None:  # another process has just removed it
        return {"artifacts": [], "started": 0.0, "owner": None, "project": None}
    try:
        note = json.loads(found[0])
        owned = {key: note.get(key) for key in ("owner", "project")}
        return owned | {"artifacts": list(note["artifacts"]), "started": float(note.get("started", 0))}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Fault(f"{store.link(key)}: damaged; remove it, and gc can remove its artifacts") from None


def _tree(made: Artifact, everything: dict[str, Artifact], depth: int) -> str:
    lines = []
    for name, fingerprint in made.stage.inputs.items():
        source = everything.get(fingerprint)
        lines.append(f"{'  ' * depth}{name}: {source.key if source else f'{fingerprint} (deleted)'}\n")
        lines += [_tree(source, everything, depth + 1)] if source else []
    if not lines and depth == 1:
        return f"  {json.dumps(made.stage.config)}\n"
    return "".join(lines)


def _one(store: Store, part: str) -> Artifact:
    everything = artifact.every(store)
    part = part.rstrip("/")  # shell completion appends a slash to the name of a folder
    found = [made for made in everything if made.key.startswith(part) or made.stage.fingerprint.startswith(part)]
    if len(found) != 1:
        there = ", ".join(made.key for made in found) or "none; python -m flows.artifacts list shows all"
        raise Fault(f"{part}: names {len(found)} artifacts: {there}")
    return found[0]


if __name__ == "__main__":
    closed_pipe.run(main)
