"""Score a model in Hugging Face format with vLLM, on held-out rows and on tasks of lm-eval.

    python -m trainer.evaluate CONF [key=value ...]        one process, on a GPU or a CPU
    torchrun --nproc-per-node 1 ... -m trainer.evaluate RESOLVED.yaml     on each host of a gang; the first one writes

Reads the model in paths.served. The task held_out also reads test.jsonl of the prepared data, with the template of the
preparation, or the test tokens if the data are texts. Other tasks are lm-eval's, by name (their data come from the Hub)
or by the path of a YAML file. Writes to paths.evaluation:

    results.json       metrics ("held_out/exact_match"), rows, samples, parity, chat_template (SHA-256), versions
    scores.json        by metric, for each row the sum of its values and their number; for metrics that are a
                       function of the mean over all values
    progress.jsonl     appended during the run: finished rows, all rows, and the current part
    log.txt            output of vLLM and lm-eval
    log_probs.json     the model's log-probabilities of the parity prompts, if needed: of a tuned model, and of a
                       base with rounded weights

The served model must compute the same log-probabilities for the same tokens as training, which are in paths.parity
(trainer/training/parity.py); otherwise results.json has parity.ok false, and the command ends with a fault. The command
also ends with a fault, before loading anything, if the export says that it was trained and that file is missing or
belongs to other weights. The model must also give the same log-probabilities for tokens when it generates them and when
it reads them (trainer/serving/decoding.py). One line says what was compared, or why nothing was.

With evaluate.adapter unmerged or packed the model is paths.model, served with the adapter in paths.export.
"""

# pyright: reportArgumentType=false

import importlib.metadata
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

from conf.rules.serving import may_be_apart, precision, rounding
from conf.schema.run import Run
from contract import checksums, output_marks
from contract.faults import Fault, line_of
from contract.files import write_atomically
from contract.output_marks import EVALUATION, take
from trainer.checks import inputs, places
from trainer.serving import agreement, engine, full_memory, held_out, hosts, lm_tasks, prompts, unmerged
from trainer.startup import entry, full_disk
from trainer.startup.console import say

TOOLS = ("vllm", "lm_eval", "torch", "transformers")
SAY_EVERY = 5.0  # seconds
LOG_LINES = 15  # last lines of log.txt, shown after a failure


def main(run: Run) -> None:
    if hosts.only_computes():
        engine.prepare(Path(run.paths.kernels), online=False)
        engine.serve(run, precision(run), lambda *_: None)
    with full_disk.named(Path(run.paths.evaluation), Path(run.paths.kernels), Path(tempfile.gettempdir())):
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
        if full := full_memory.line(f"{_output_since(log, begin)}\n{error}"):  # a worker's message is only in the log
            raise Fault(full) from error
        _show_failure(error, log, begin)
        sys.exit(1)
    write_atomically(folder / "scores.json", json.dumps(results.pop("scores")), durable=True)
    results |= {"seconds": round(time.monotonic() - started, 1)}
    results["versions"] = {name: importlib.metadata.version(name) for name in TOOLS}
    write_atomically(folder / "results.json", json.dumps(results, indent=1, ensure_ascii=False), durable=True)
    output_marks.finished(folder)
    for name, value in results["metrics"].items():
        say(f"evaluate: {name} {value:.4f}")
    say(f"evaluate: {agreement.summary(results['parity'], results['parity_not_compared'])}")
    if results["parity"]:
        agreement.require(results["parity"])
        agreement.require_small_loss(results["parity"], run.export.quantization)
    say(f"evaluate: {folder / 'results.json'}, after {results['seconds']} s")


def evaluate(run: Run, progress: "Progress") -> dict:
    names = list(run.evaluate.tasks)
    elsewhere = [name for name in names if name != held_out.NAME]
    computed = precision(run)
    engine.prepare(Path(run.paths.kernels), online=any(not prompts.is_task_file(name) for name in elsewhere))
    of_texts = held_out.NAME in names and held_out.has_texts(run)
    test = held_out.read(run) if held_out.NAME in names and not of_texts else None
    tasks = lm_tasks.load(run, elsewhere) if elsewhere else {}
    say(f"evaluate: starting vLLM on this host's {engine.device()} for {_shown(run)}")
    began = time.monotonic()
    served = engine.serve(run, computed, progress)
    say(f"evaluate: vLLM answers in {_kind(run, computed)}, after {time.monotonic() - began:.1f} s")
    results = {"metrics": {}, "rows": {}, "samples": {}, "scores": {}}
    for name in names:
        progress.task = name
        if name in tasks:
            answers = lm_tasks.ask(run, served, tasks[name])
        else:
            answers = held_out.ask(run, served, test) if test else held_out.ask_texts(run, served)
        for key, values in answers.items():
            results[key] |= values
    progress.task = "parity"
    results["parity"], results["parity_not_compared"] = agreement.compare(run, served, computed)
    if may_be_apart(run) and results["parity"] is None:
        agreement.write_base(run, served)
    template = unmerged.model(run) / "chat_template.jinja"
    results["chat_template"] = checksums.of(template.read_bytes()) if template.exists() else None
    return results


def _shown(run: Run) -> str:
    adapter = unmerged.find(run)
    return f"{unmerged.model(run)}" + (f" with the adapter {adapter.folder}" if adapter else "")


def _kind(run: Run, computed: str) -> str:
    kind = rounding(run)
    return f"{kind.replace('_', ' ')}, computed in {computed}" if kind else computed


class Progress:
    """Counter of finished rows. It appends to progress.jsonl every second, and prints a line every few seconds."""

    def __init__(self, path: Path):
        self.path, self.task = path, ""
        self.written = self.printed = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if done == total or now - self.written >= 1:
            self.written = now
            with self.path.open("a") as f:
                f.write(json.dumps({"done": done, "total": total, "what": f"{self.task} {what}"}) + "\n")
        if done == total or now - self.printed >= SAY_EVERY:
            self.printed = now
            say(f"evaluate: {self.task} {what}: {done} of {total} rows")


def _output_since(log: Path, begin: int) -> str:
    with log.open(errors="replace") as f:
        f.seek(begin)
        return f.read()


def _show_failure(error: Exception, log: Path, begin: int) -> None:
    with log.open("a") as f:
        traceback.print_exception(error, file=f)
    sys.stderr.write("".join(_output_since(log, begin).splitlines(keepends=True)[-LOG_LINES:]))
    sys.stderr.write(f"error: the evaluation broke off; the lines above are the last of {log}\n")


if __name__ == "__main__":
    entry.start(
        main, inputs.check_evaluate, alone=True, writes="evaluation", may_write=places.check_evaluate, gpus="evaluate"
    )
