"""Toy of every trainer command: it writes what its stage looks for, and does what TOY says. Half a second each.

    install(folder)     makes folder/trainer with a module for each; a flow that is started in folder runs those

TOY is JSON: what befalls a stage, by name (evaluate-base and evaluate-tuned apart): {"evaluate-base": "crash"}.
crash = a segmentation fault; fail = exit code 1; fault = exit code 2; slow = waits for the file folder/go; late-crash =
once training has begun; half = a training waits after its first step. A training goes on after the last step of its
metrics. Each appends its name, "begins" or "ends" and the time to folder/events.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

COMMANDS = ("tiny", "prepare", "convert", "train", "export", "evaluate")


def install(folder: Path) -> None:
    place = folder / "trainer"
    place.mkdir(parents=True)
    for name in ("__init__", *COMMANDS):
        body = "" if name == "__init__" else f"from tests.support import toy_trainer\ntoy_trainer.main({name!r})\n"
        (place / f"{name}.py").write_text(body)


def events(folder: Path) -> list[tuple[str, str, float]]:
    """Events in order: the stage, begins or ends, and the time."""
    path = folder / "events"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(name, what, float(at)) for name, what, at in lines]


def main(command: str) -> None:
    if command == "tiny":
        return _write(Path(sys.argv[2]) / "config.json", {})
    import yaml

    run = yaml.safe_load(Path(sys.argv[1]).read_text())
    paths = {name: Path(path) for name, path in run["paths"].items()}
    name = command
    if command == "evaluate":
        name += "-tuned" if paths["parity"].exists() else "-base"
    fate = json.loads(os.environ.get("TOY", "{}")).get(name, "")
    _event(name, "begins")
    print(f"{name}: toy", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: _leave(name))
    if command == "evaluate":
        paths["evaluation"].mkdir(parents=True, exist_ok=True)
        (paths["evaluation"] / "log.txt").write_text("INFO loads\nERROR head_dim 24 is not supported\n")
    if fate == "half":
        _train(paths, 1)
    while fate in ("slow", "half") and not Path("go").exists():
        time.sleep(0.05)
    while fate == "late-crash" and "train begins" not in Path("events").read_text():
        time.sleep(0.05)
    if fate.endswith("crash"):
        _event(name, "ends")
        os.kill(os.getpid(), signal.SIGSEGV)
    if fate in ("fail", "fault"):
        _event(name, "ends")
        print("error: evaluate.toy: wrong" if fate == "fault" else "ValueError: no", file=sys.stderr)
        sys.exit({"fail": 1, "fault": 2}[fate])
    globals()[f"_{command}"](paths)
    if command == "train":
        _write(paths["output"] / f"checkpoints/iter_{run['train']['steps']:07d}/complete.json", {"files": {}})
    time.sleep(0.3)
    _event(name, "ends")


def _leave(name: str) -> None:
    _event(name, "ends")
    sys.exit(1)


def _prepare(paths: dict[str, Path]) -> None:
    tokens = {split: {"rows": 16, "tokens": 160, "learned": 80} for split in ("training", "validation", "test")}
    rows = {"read": 48, "kept": 48, "training": 16, "validation": 16, "test": 16}
    report = {"rows": rows, "tokens": tokens, "dropped": {}, "sources": [], "template": {}}
    _write(paths["data"] / "report.json", report)
    _write(paths["data"] / "prepared.json", {"kind": "sft", "rows": rows, "sequences": rows})


def _convert(paths: dict[str, Path]) -> None:
    _write(paths["base"] / "complete.json", {})


def _train(paths: dict[str, Path], last: int = 2) -> None:
    keys = {"lm_loss": 2.0, "step_seconds": 0.1, "memory_gb": 0.1, "lr": 1e-3}
    file = paths["output"] / "metrics.jsonl"
    done = len(file.read_text().splitlines()) if file.exists() else 0
    with file.open("a") as metrics:
        for step in range(done + 1, last + 1):
            metrics.write(json.dumps({"kind": "train", "step": step, "time": time.time()} | keys) + "\n")
    _write(paths["parity"], {})


def _export(paths: dict[str, Path]) -> None:
    _write(paths["export"] / "merged/config.json", {})


def _evaluate(paths: dict[str, Path]) -> None:
    score = 1.0 if paths["parity"].exists() else 0.0
    found = {"metrics": {"held_out/exact_match": score}, "samples": {}, "parity": None, "chat_template": None}
    _write(paths["evaluation"] / "results.json", found)


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _event(name: str, what: str) -> None:
    with Path("events").open("a") as file:
        file.write(f"{name} {what} {time.time()}\n")
