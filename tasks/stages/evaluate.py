"""Stage evaluate: metrics of the base or the tuned model, served by vLLM, and a comparison of serving with training."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import State, task

from conf.rules import packed_base, serving, shipping
from conf.schema import identity
from conf.schema.run import Run
from conf.strict_yaml import UNFIT
from contract import regular_files
from contract.faults import Fault
from tasks.run import launch
from tasks.run.artifact import Artifact, Stage, Work
from tasks.run.places import kernels_folder
from tasks.run.progress import Progress, newest
from tasks.run.session import OPTIONS, StageRun
from tasks.stages.run_job import run_job

VERSION = 1
SHOWN = 5  # last lines of vLLM's log


def stage(run: Run, model: Stage, data: Stage, trained: Stage | None = None, before: Stage | None = None) -> Stage:
    config: dict[str, Any] = {**identity.of(run if trained else shipping.of_base(run), "evaluate")}
    config["precision"] = serving.precision(run)
    config["task_files"] = {task: _content(task) for task in run.evaluate.tasks if task.endswith((".yaml", ".yml"))}
    if trained and run.evaluate.adapter != "merged":  # a base has no adapter
        config["adapter"] = run.evaluate.adapter
    inputs = {"model": model.fingerprint, "data": data.fingerprint}
    inputs |= {"trained": trained.fingerprint} if trained else {}
    inputs |= {"before": before.fingerprint} if before and serving.is_apart(run) else {}
    return Stage("evaluate", VERSION, config, inputs)


@task(name="evaluate", **OPTIONS)
def evaluate(
    stage_run: StageRun,
    model: Artifact,
    data: Artifact,
    trained: Artifact | None = None,
    released: Artifact | None = None,
    before: Any = None,
) -> State:
    """Evaluate the base or the tuned model.

    `before` is the base's evaluation or its error. A tuned model with rounded weights is compared with the base.
    """
    name = stage_run.name

    def make(work: Work) -> dict:
        output = work.files
        paths: dict[str, Artifact | Path] = {"data": data, "evaluation": output, "kernels": kernels_folder()}
        paths |= {"parity": work.folder / "none.json"} | _served(stage_run, model, released if trained else None)
        if trained:
            apart = serving.is_apart(stage_run.run)
            paths |= {"parity": stage_run.local(trained) / "parity.json"}
            paths |= {"of_base": _made(before) if apart else work.folder / "none"}
        bar = Progress(name, "rows")
        task_files = stage_run.asked.config["task_files"]
        require_unchanged(task_files)
        run = stage_run.at(work, **paths)
        if not trained:  # a base has no adapter to serve
            run = run.changed(evaluate={"adapter": "merged"})
        done = output / "progress.jsonl"
        try:
            run_job(stage_run, work, "evaluate", run, lambda: bar.update(*newest(done, "done", "total")))
        except launch.Crashed as crash:
            raise launch.Crashed(_last_words(crash, output / "log.txt")) from None
        require_unchanged(task_files)  # the fingerprint names these files
        found = json.loads((output / "results.json").read_text())
        tracked = stage_run.tracked()
        tracked.table(
            [{"task": task, **row} for task, rows in found["samples"].items() for row in rows], "answers.json"
        )
        tracked.model(f"{run.name}-{name.removeprefix('evaluate-')}", stage_run.store.link(f"{model.key}/files"))
        link = stage_run.store.link(f"{data.key}/files")
        tracked.dataset(f"{run.name}-test", data.digest, link, "evaluation", data.result["rows"]["test"])
        return {"metrics": found["metrics"], "parity": found["parity"], "chat_template": found["chat_template"]}

    return stage_run.get_or_make(make)


def _served(stage_run: StageRun, model: Artifact, released: Artifact | None) -> dict[str, Artifact | Path]:
    """Paths of the served model: the base, the merged model, or the base with the exported adapter."""
    as_codes = packed_base.is_served(stage_run.run)
    if released is None:
        return {"served": stage_run.local(model) / "merged" if as_codes else model}
    if stage_run.run.evaluate.adapter == "merged":
        return {"served": stage_run.local(model) / "merged"}
    return {"model": stage_run.local(released) / "merged" if as_codes else released, "export": model}


def _made(before: Any) -> Artifact:
    if isinstance(before, Artifact):
        return before
    raise Fault(
        "evaluate.quantization, export.quantization or model.base: the tuned model is compared with the base, served "
        "in the same way, but evaluate-base has no result; null, or model.base=bf16, compares it with training only"
    )


def _last_words(crash: launch.Crashed, log: Path) -> str:
    """Return the crash in one line, and the last lines of vLLM's log."""
    first = str(crash).partition(";")[0]
    with contextlib.suppress(OSError):
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-SHOWN:]
        return "\n".join([f"{first}; vLLM does not serve this model here; the last lines of {log}:", *last])
    return str(crash)


def require_unchanged(task_files: dict[str, str]) -> None:
    """Raise a Fault if task files have changed since the run began: the fingerprint has their content at that time."""
    for path, digest in task_files.items():
        if _content(path) != digest:
            raise Fault(f"evaluate.tasks: {path}: it or its data have changed since the run began; start it again")


def _content(path: str) -> str:
    """Return the digest of a task file and of the local data files that it names."""
    file = Path(path)
    if not file.is_file():
        raise Fault(f"evaluate.tasks: {path}: no such file")
    import yaml

    text = regular_files.read(file)
    digest = hashlib.sha256(text)
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda *_: None)  # lm-eval's !function
    try:
        settings = yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, *UNFIT) as error:
        raise Fault(f"evaluate.tasks: {path}: not YAML: {' '.join(str(error).split())}") from None
    kept = settings.get("dataset_kwargs") or {} if isinstance(settings, dict) else None
    if not isinstance(kept, dict):
        raise Fault(f"evaluate.tasks: {path}: not a task of lm-eval; a task is a section of keys")
    named = kept.get("data_files")
    for name in sorted(_texts(named)) if isinstance(named, dict) else _texts(named):
        if Path(name).is_file():
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in nested lists and sections."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)
