"""Files of a host that does not share FINETUNE_RUNS with the others: artifacts, and the checkpoint to resume from."""

import os
from collections.abc import Callable
from pathlib import Path

from conf.schema.run import Run
from contract.faults import Fault, Stopped
from tasks.gang.copies import METRICS, Copies, remove_others
from tasks.run import artifact
from tasks.run.places import runs_folder
from tasks.store import Progress, Store

CACHE = "cache"  # folder of artifacts, as in tasks/run/session.py


def local_run(run: Run, theirs: Path, store: Store, progress: Progress) -> Run:
    """Return the run with paths of this host. Artifacts that this host lacks are fetched from the store."""
    own, shared = runs_folder() if os.environ.get("FINETUNE_RUNS") else theirs, store.place("")
    paths = {key: Path(path) for key, path in run.paths if Path(path).is_relative_to(theirs)}
    local = {}
    for key, path in paths.items():
        if path.is_relative_to(theirs / CACHE):
            name, *inside = path.relative_to(theirs / CACHE).parts
            local[key] = _artifact(name, "/".join(inside), store, own / CACHE, progress)
        elif not (shared and path.is_relative_to(shared)):
            local[key] = own / path.relative_to(theirs)
    return run.changed(paths={key: str(path) for key, path in local.items()})


def _artifact(name: str, inside: str, store: Store, cache: Path, progress: Progress) -> Path:
    """Return the place of an artifact on this host, or of a file or folder inside it, which alone is fetched."""
    made = artifact.read(store, "/".join(name.rsplit("-", 1)))
    if made is None:
        raise Fault(f"{store.link(name)}: no longer in the store; start the run again")
    if not inside:
        return artifact.local(made, store, cache, progress)
    files = {name: file for name, file in made.files.items() if f"{name}/".startswith(f"{inside}/")}
    store.get(f"{made.key}/files", files, cache / f"{name}-parts", progress)
    return cache / f"{name}-parts" / inside


def resume(run: Run, copies: Copies, step: int, first: bool, progress: Progress) -> None:
    """Give this host the checkpoint of this step, with the parts of all hosts, and no other; step 0 is none."""
    output = Path(run.paths.output)
    steps = {step} if step else set[int]()
    if step and first and run.checkpoint.keep_best and (best := copies.best(copies.steps())):
        steps.add(best)  # its loss and its files: a later checkpoint may not be better
    remove_others(output, steps)
    if not step:
        (output / METRICS).unlink(missing_ok=True)
    for number in sorted(steps):
        _fetch(copies, number, output, progress)
        copies.put_mark(number, output)
    if step:
        copies.write_trackers(step, output)
    if step and first:
        copies.fetch_small(step, output)


def _fetch(copies: Copies, step: int, output: Path, progress: Progress) -> None:
    """Fetch a checkpoint. One that is damaged in the store no longer counts: the next attempt uses an earlier one."""
    files = copies.record(step)
    try:
        copies.store.get(copies.files, files, output, progress)
    except Fault:
        for name, damage in copies.store.changed(copies.files, files).items():
            copies.store.remove(copies.place(step))
            raise Fault(f"checkpoint {step}: {copies.store.link(copies.files)}/{name}: {damage}") from None
        raise


def reporting(say: Callable[..., None], stop: Callable[[], str]) -> Progress:
    """Return a progress that reports to the controller, and raises Stopped if the attempt ends."""

    def update(done: int, total: int) -> None:
        if why := stop():
            raise Stopped(why)
        say(fetched=(done, total))

    return update
