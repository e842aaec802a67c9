"""Score a model in Hugging Face format, served by vLLM, on held-out rows and on tasks of lm-eval.

    python -m trainer.evaluate CONF [key=value ...]        one process, on a GPU or a CPU
    torchrun --nproc-per-node 1 ... -m trainer.evaluate RESOLVED.yaml     on each host of a gang; the first one writes

Reads the model in paths.served and, for the task held_out, test.jsonl of the prepared data, with the template that they
were prepared with, or the tokens of the test where they are texts. Other tasks are lm-eval's, by name
(their data come from the Hub) or by the path of a YAML file. Writes to paths.evaluation:

    results.json       metrics ("held_out/exact_match"), rows, samples, parity, chat_template (SHA-256), versions
    scores.json        by metric, for each row: the sum of its values, and how many these are; for metrics that are a
                       function of the mean over all of them
    progress.jsonl     appended to while it runs: done and total rows, of what
    log.txt            what vLLM and lm-eval print
    log_probs.json     what the model says of the prompts of parity, where it is asked for them: a tuned one, and a
                       base where weights are rounded

The served model must find the same log-probabilities for the same tokens as training did, which are in paths.parity
(trainer/training/parity.py): else results.json says parity.ok false, and the command ends with a fault. So it does,
before anything is loaded, where the export says that it was trained and that file is missing or of other weights. It
must also say the same of tokens that it writes as of tokens that it reads (trainer/serving/decoding.py). What was
compared, or why nothing was, is said in a line.

With evaluate.adapter=unmerged the model is paths.model, with the adapter in paths.export beside it.
"""

# pyright: reportArgumentType=false

import contextlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from conf.rules.serving import may_be_apart, precision, rounding
from conf.schema.run import Run
from contract import checksums, output_marks
from contract.amounts import size
from contract.faults import Fault, line_of
from contract.files import write_atomically
from contract.output_marks import EVALUATION, take
from trainer.checks import inputs, places
from trainer.serving import agreement, engine, full_memory, held_out, held_out_texts, hosts, lm_tasks, prompts, unmerged
from trainer.startup import entry
from trainer.startup.console import say

SAY_EVERY = 5.0  # seconds
LOG_LINES = 15  # shown of log.txt when something breaks


def main(run: Run) -> None:
    if hosts.only_computes():
        engine.prepare(Path(run.paths.kernels), online=False)
        engine.serve(run, precision(run), lambda *_: None)
    with naming_the_disk(Path(run.paths.evaluation), Path(run.paths.kernels), Path(tempfile.gettempdir())):
        _score(run, Path(run.paths.evaluation))


def _score(run: Run, folder: Path) -> None:
    started = time.monotonic()
    take(folder, EVALUATION)
    (folder / "results.json").unlink(missing_ok=True)
    log = folder / "log.txt"
    begin = log.stat().st_size if log.exists() else 0
    try:
        with engine.output_to(log):
            results = evaluate(run, Progress(folder / "progress.jsonl"))
    except Exception as error:
        if line_of(error):
            raise
        if full := full_memory.line(f"{_said(log, begin)}\n{error}"):  # a worker's own words are in the log alone
            raise Fault(full) from error
        _show_failure(error, log, begin)
        sys.exit(1)
    write_atomically(folder / "scores.json", json.dumps(results.pop("scores")), durable=True)
    results |= {"seconds": round(time.monotonic() - started, 1), "versions": _versions()}
    write_atomically(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False), durable=True)
    output_marks.finished(folder)
    for name, value in results["metrics"].items():
        say(f"evaluate: {name} {value:.4f}")
    say(f"evaluate: {agreement.summary(results['parity'], results['parity_not_compared'])}")
    if results["parity"]:
        agreement.require(results["parity"])
    say(f"evaluate: {folder / 'results.json'}, after {results['seconds']} s")


@contextlib.contextmanager
def naming_the_disk(*folders: Path) -> Iterator[None]:
    """Name the folder with the least room in the line of a full disk: an error of writing names none."""
    try:
        yield
    except Exception as error:
        line = line_of(error) or ""
        if not line.startswith("disk:"):
            raise
        there = [next(one for one in (path.absolute(), *path.absolute().parents) if one.exists()) for path in folders]
        free, folder = min((shutil.disk_usage(one).free, str(one)) for one in there)
        raise Fault(f"{folder}: {line.removeprefix('disk: ')}; {size(free)} are free there") from error


def evaluate(run: Run, progress: "Progress") -> dict:
    names = list(run.evaluate.tasks)
    elsewhere = [name for name in names if name != held_out.NAME]
    computed = precision(run)
    engine.prepare(Path(run.paths.kernels), online=any(not prompts.is_task_file(name) for name in elsewhere))
    of_texts = held_out.NAME in names and held_out_texts.are_prepared(run)
    test = held_out.read(run) if held_out.NAME in names and not of_texts else None
    tasks = lm_tasks.load(run, [name for name in names if name != held_out.NAME or test], test)
    say(f"evaluate: starting vLLM on this host's {engine.device()} for {_shown(run)}")
    began = time.monotonic()
    served = engine.serve(run, computed, progress)
    say(f"evaluate: vLLM answers in {_kind(run, computed)}, after {time.monotonic() - began:.1f} s")
    results = {"metrics": {}, "rows": {}, "samples": {}, "scores": {}}
    for name in names:
        progress.task = name
        served.tokens = test.tokens() if test and name == held_out.NAME else None
        answers = lm_tasks.ask(run, served, tasks[name]) if name in tasks else held_out_texts.ask(run, served)
        for key, found in answers.items():
            results[key] |= found
    progress.task = "parity"
    results["parity"], results["parity_not_compared"] = agreement.compare(run, served, computed)
    if may_be_apart(run) and results["parity"] is None:
        agreement.write_base(run, served)
    results["chat_template"] = _chat_template(unmerged.model(run))
    return results


def _shown(run: Run) -> str:
    adapter = unmerged.find(run)
    return f"{unmerged.model(run)}" + (f" and {adapter.folder} beside it" if adapter else "")


def _kind(run: Run, computed: str) -> str:
    kind = rounding(run)
    return f"{kind.replace('_', ' ')}, computed in {computed}" if kind else computed


class Progress:
    """Counter of rows done. It appends to progress.jsonl every second, and prints a line every few seconds."""

    def __init__(self, path: Path):
        self.path, self.task = path, ""
        self.written = self.said = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if done == total or now - self.written >= 1:
            self.written = now
            with self.path.open("a") as f:
                f.write(json.dumps({"done": done, "total": total, "what": f"{self.task} {what}"}) + "\n")
        if done == total or now - self.said >= SAY_EVERY:
            self.said = now
            say(f"evaluate: {self.task} {what}: {done} of {total} rows")


def _chat_template(folder: Path) -> str | None:
    template = folder / "chat_template.jinja"
    return checksums.of(template.read_bytes()) if template.exists() else None


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("vllm", "lm_eval", "torch", "transformers")}


def _said(log: Path, begin: int) -> str:
    with log.open(errors="replace") as f:
        f.seek(begin)
        return f.read()


def _show_failure(error: Exception, log: Path, begin: int) -> None:
    with log.open("a") as f:
        f.write("".join(traceback.format_exception(error)))
    sys.stderr.write("".join(_said(log, begin).splitlines(keepends=True)[-LOG_LINES:]))
    sys.stderr.write(f"error: the evaluation broke off; the lines above are the last of {log}\n")


if __name__ == "__main__":
    entry.start(
        main, inputs.check_evaluate, alone=True, writes="evaluation", may_write=places.check_evaluate, gpus="evaluate"
    )
