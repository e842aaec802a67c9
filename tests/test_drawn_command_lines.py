"""Random configurations and command lines: a result or lines of refusal, never a stack trace, and nothing starts.

Draws are the same each time. Lines of a command that could start work end with a key that does not exist.
"""

import random
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from conf.load import FOLDER
from conf.schema.run import Run, sections
from flows import plan
from tasks.servers import prefect_server
from tasks.sources.hub import api

FEW, MANY = 100, 2000
FEW_LINES, MANY_LINES = 60, 300
UNKNOWN = "no.such_key=1"
TEXTS = ["", "''", "~", "null", "é\udcff", "[", "{a: 1}", "*a", "a: b", "x" * 300, "/", "..", "1e999", ".nan", "010"]
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, 2**16, 2**31 - 1, 2**31, -1, 0.5, 1e-320, 1e308, 1e-5, 10**40]
KINDS = ["tiny://glm4-moe", "tiny://gpt2", "tiny://qwen3", "tiny://deepseek-v3", "tiny://none", "org/name", "glm47"]
NAMES = [file.stem for file in FOLDER.glob("*.yaml")]
PLACES = ["nowhere", "/nope", "/", "/dev/null", ".", "", "-", "--", "tiny.yaml", "a/b/c", "x" * 300, "é\udcff", "\n"]
OF_RUN = ["--steps", "--gpus", "--json", "--until", "--from", "--dry-run", "--stage", "--engine", "--track", "--layers"]
OF_RUN += [
    "--price",
    "--gpu",
    "--top",
    "--rehearse",
    "--profile",
    "--report",
    "--only",
    "--best",
    "--answer",
    "--planned",
]
# Commands that take a configuration, and whether they only print, as a flow does that finds no server.
RUNS = dict.fromkeys(("benchmarks.study", "benchmarks.card"), False)
RUNS |= dict.fromkeys(("flows.finetune", "flows.pretrain", "flows.plan", "flows.gang", "conf.load"), True)
RUNS |= {f"trainer.{name}": False for name in ("prepare", "convert", "train", "export", "evaluate", "reinforce")}
RUNS |= {f"trainer.{name}": False for name in ("compare", "rehearse", "trial", "preflight", "measure", "first_rows")}
RUNS |= {f"trainer.{name}": False for name in ("reference", "proof.base", "proof.export")}
# Others, with their words; each line has one that is wrong at least.
OTHERS = {
    "flows.artifacts": ["list", "show", "verify", "gc", "--days", "x" * 64],
    "flows.logs": ["--tail", "--rank", "--attempt", "--err", "train-0123456789abcdef"],
    "flows.serve": ["--port", "--length", "--adapter", "--adapters", "a@b", "a@1", "load", "unload"],
    "flows.deploy": [],
    "flows.doctor": ["--extra", "--json"],
    "flows.services": ["start", "stop"],
    "flows.new": ["--gpus", "--name", "--print", "--yes", "--force"],
    "benchmarks.licences": ["--all"],
    "flows.automations": ["--keep"],
    "conf.network": ["ib-h100", "--gpu", "glm47"],
    "benchmarks.presets": [],
    "conf.schema": ["--table"],
    "tasks.tracking": ["--timeout", "--after"],
    "trainer.tiny": ["llama", "tickets", "--rows", "--seed", "--dtype"],
    "trainer.profiling": ["--json"],
    "benchmarks.families": ["--steps", "llama"],
    "benchmarks.layouts": ["--steps", "--workdir"],
    "trainer.weights.drawn": ["--tokenizer", "--seed"],
}


def value(draw: random.Random, field: dict[str, Any]) -> str:
    """A value for a key: mostly one that its JSON schema allows."""
    if draw.random() < 0.15:
        return str(draw.choice(TEXTS + NUMBERS))
    field = draw.choice(field["anyOf"]) if "anyOf" in field else field
    if "enum" in field or "const" in field:
        return str(draw.choice(field.get("enum", [field.get("const")])))
    match field.get("type"):
        case "integer" | "number":
            low, high = field.get("minimum", field.get("exclusiveMinimum", 0)), field.get("maximum", 2**31 - 1)
            wide = [one for one in NUMBERS if low <= one <= high]
            return str(draw.choice([low, high, *wide]))
        case "boolean":
            return draw.choice(["true", "false"])
        case "array":
            items = field.get("items", {})
            return f"[{', '.join(value(draw, items) for _ in range(draw.randrange(3)))}]"
        case "null":
            return "null"
    return draw.choice(KINDS + NAMES)


FIELDS = {
    f"{section}.{key}": field
    for section, kind in sections().items()
    for key, field in kind.model_json_schema()["properties"].items()
} | {"name": Run.model_json_schema()["properties"]["name"]}


def overrides(draw: random.Random, most: int) -> list[str]:
    return [f"{key}={value(draw, FIELDS[key])}" for key in draw.sample(sorted(FIELDS), draw.randrange(most + 1))]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """An empty folder, without a Hub, a store or a server; signals are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(api, "WAITS", ())
    monkeypatch.setattr(prefect_server, "use", lambda: sys.exit("a flow would start"))
    for name in ("FINETUNE_STORE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    yield
    for one, handler in handlers.items():
        signal.signal(one, handler)


def starts(most: int, few: int) -> list[Any]:
    """Where each part of the draws starts; all parts but the first are slow."""
    return [pytest.param(start, marks=[pytest.mark.slow] if start else []) for start in range(0, most, few)]


@pytest.mark.parametrize("start", starts(MANY, FEW))
@pytest.mark.timeout(900)
def test_a_random_configuration_is_planned_or_refused_in_lines(capfd, start):
    for seed in range(start, start + FEW):
        draw = random.Random(seed)
        words = [draw.choice(NAMES), *overrides(draw, 5)]
        try:
            code = plan.main(words)
        except BaseException as error:
            raise AssertionError(f"{seed}: {words}") from error
        errors = capfd.readouterr().err
        assert code in (0, 1, 2) and all(line.startswith("error: ") for line in errors.splitlines()), (words, errors)


def line_of(draw: random.Random) -> list[str]:
    command = draw.choice(sorted(RUNS) + sorted(OTHERS))
    if command in OTHERS:
        words = [draw.choice([*OTHERS[command], *PLACES, *map(str, NUMBERS)]) for _ in range(draw.randrange(4))]
        return [command, *words, f"--no-such-option={draw.random()}"]
    words = [draw.choice(NAMES + PLACES), *overrides(draw, 3)]
    for _ in range(draw.randrange(4)):
        words.insert(draw.randrange(len(words) + 1), draw.choice(OF_RUN + [str(one) for one in NUMBERS]))
    return [command, *words, *([] if RUNS[command] else [UNKNOWN])]


def run(line: list[str], monkeypatch) -> object:
    """The exit code of a command, which runs in this process."""
    command, *words = line
    monkeypatch.setattr(sys, "argv", [command, *words])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code
    return 0


@pytest.mark.parametrize("start", starts(MANY_LINES, FEW_LINES))
@pytest.mark.timeout(900)
def test_a_random_command_line_is_answered_without_a_stack_trace(capfd, monkeypatch, start):
    for seed in range(start, start + FEW_LINES):
        line = line_of(random.Random(seed))
        try:
            code = run(line, monkeypatch)
        except BaseException as error:
            raise AssertionError(f"{seed}: {line}") from error
        errors = capfd.readouterr().err
        assert code is not None and "Traceback" not in errors, (seed, line, errors)
        assert not [*Path().glob("runs/*")], (seed, line)
