"""Stage: the data as training, evaluation and vLLM read them: training.jsonl, validation.jsonl and test.jsonl."""

import heapq
import json
from pathlib import Path

from prefect import State, task

from conf.schema import Data, Run
from tasks import launch, rows
from tasks.artifact import Stage, Work
from tasks.faults import Fault
from tasks.session import OPTIONS, Session

VERSION = 1
TICKETS = "tiny://tickets"


def stage(run: Run) -> Stage:
    data = run.data
    if data.source is None:
        raise Fault("data.source: required by the flow: a Hub data set, a JSON lines file, or tiny://tickets")
    config = data.model_dump(mode="json", include={"input", "output", "rows", "validation", "test"})
    if data.source.startswith("tiny://"):
        if data.source != TICKETS:
            raise Fault(f"data.source: {data.source}: no such data; there is {TICKETS}")
        config |= {"source": data.source}
    elif rows.is_file(data.source):
        config |= {"content": rows.content(data.source)}
    else:
        config |= {"source": data.source, "config": data.config, "split": data.split, "commit": rows.commit(data)}
    return Stage("prepare", VERSION, config)


@task(name="prepare", **OPTIONS)
def prepare(session: Session) -> State:
    """Prepare the data."""
    data, config = session.run.data, session.stages["prepare"].config

    def make(work: Work) -> dict:
        source = data
        if data.source == TICKETS:
            made = work.folder / "tickets.jsonl"
            launch.process(["trainer.tickets", str(made)], work.folder / "tickets.log", work.say, session.stopped(work))
            source = data.model_copy(update={"source": str(made)})
        return write(source, config.get("commit"), work.folder / "files")

    return session.obtain("prepare", make)


def write(data: Data, commit: str | None, folder: Path) -> dict:
    """Splits the rows over three files, in the order of the source. Returns their counts."""
    pairs = rows.read(data, commit)
    if data.rows is not None:
        pairs = iter(_chosen(pairs, data.rows))
    counts = dict.fromkeys(rows.SPLITS, 0)
    files = {name: (folder / f"{name}.jsonl").open("w", encoding="utf-8") for name in rows.SPLITS}
    try:
        for pair in pairs:
            name = rows.split(pair, data)
            files[name].write(json.dumps({"input": pair[0], "output": pair[1]}, ensure_ascii=False) + "\n")
            counts[name] += 1
    finally:
        for file in files.values():
            file.close()
    shares = {"training": 1.0, "validation": data.validation, "test": data.test}
    if not any(counts.values()):
        raise Fault(f"data.source: {data.source}: has no rows")
    for name, share in shares.items():
        if share and not counts[name]:
            raise Fault(
                f"data.source: {data.source}: no row of {sum(counts.values())} falls to {name}; "
                "take more rows or a larger share"
            )
    return {"rows": counts}


def _chosen(pairs, count: int) -> list[tuple[str, str]]:
    """The rows whose hashes are smallest: the same ones whatever else stands in the source, in its order."""
    from hashlib import sha256

    keyed = ((sha256("\0".join(pair).encode()).digest()[8:], number, pair) for number, pair in enumerate(pairs))
    return [pair for _, _, pair in sorted(heapq.nsmallest(count, keyed), key=lambda item: item[1])]
