"""Functions, files and folders through which three objects pass: the code that a reader must know for a change.

    python -m benchmarks.trace_path            about two minutes on a CPU; everything is written to a temporary folder

- configuration: a Run, through `flows.finetune tiny`
- stage_run: the StageRun of train, from its task's begin to its end; once more with every call that the task makes
- job: a gang's Job, through an attempt that fails and is followed by one on fewer hosts; likewise

`receives` counts the functions that get the object as an argument, `calls` all functions that run meanwhile in the same
thread. Processes that the product starts are not followed: the trainer reads the configuration anew.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / name}/" for name in ("contract", "conf", "flows", "tasks", "trainer"))


class Trace:
    """Functions of the product that are called while `within` is on the stack, and those that receive the object."""

    def __init__(self, is_object: Callable[[Any], bool], holds: type | tuple[type, ...] = (), within: str = ""):
        self.is_object, self.holds, self.within = is_object, holds, within
        self.receives: set[CodeType] = set()
        self.parts: set[CodeType] = set()
        self.calls: set[CodeType] = set()
        self._threads: dict[int, FrameType] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if event == "return" and self._threads.get(thread) is frame:
            del self._threads[thread]
        if event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names]
        if any(map(self.is_object, values)):
            self.receives.add(code)
            if code.co_qualname == self.within:
                self._threads.setdefault(thread, frame)
        if thread in self._threads:
            self.calls.add(code)
            if code in self.receives or any(isinstance(value, self.holds) for value in values):
                self.parts.add(code)

    def report(self, name: str) -> None:
        for what in ("receives", "parts", "calls") if self.within else ("receives",):
            codes: set[CodeType] = getattr(self, what)
            files = {code.co_filename for code in codes}
            folders = sorted({str(Path(file).parent.relative_to(ROOT)) for file in files})
            print(f"{name:14} {what:9} {len(codes):4} functions {len(files):4} files {len(folders):3} folders")
            print(f"{'':14} {', '.join(folders)}")
            if "--files" in sys.argv:
                print("\n".join(f"  {file.removeprefix(f'{ROOT}/')}" for file in sorted(files)))


def flow(folder: Path) -> None:
    os.environ |= {"FINETUNE_RUNS": str(folder / "runs"), "FINETUNE_STORE": str(folder / "store")}
    from conf.schema.run import Run
    from flows.finetune import finetune
    from flows.run_command import command
    from tasks.run.session import StageRun

    run = Trace(lambda value: isinstance(value, Run))
    stage = Trace(
        lambda value: isinstance(value, StageRun) and getattr(value, "name", "") == "train", (StageRun, Run), "train"
    )

    def both(*event: Any) -> None:
        run(*event)
        stage(*event)

    sys.argv[1:], options = ["tiny"], sys.argv[1:]
    threading.setprofile(both)
    sys.setprofile(both)
    code = command(finetune)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    sys.argv[1:] = options
    assert code == 0
    run.report("configuration")
    stage.report("stage_run")


def gang(folder: Path) -> None:
    """Two hosts, one of which fails and is gone: threads without a training, as in tests/tasks/gang/test_controller."""
    from conf.load import load
    from conf.planner.fewer_hosts import fewer_hosts, less_memory
    from conf.schema.run import Run
    from tasks.gang import controller
    from tasks.gang.attempt import Gang
    from tasks.gang.history.timeline import History, Teller
    from tasks.gang.job import Job, Training
    from tasks.store import open_store
    from tests.tasks.gang.test_controller import Hosts

    class Lossy(Hosts):
        def start(self, demand: Any, board: Any, n: int, without: tuple[str, ...] = ()) -> Any:
            if self.given:
                self.trained.set()
            handle = super().start(demand, board, n, without)
            self.names = self.names[:1]
            return handle

    store = open_store(str(folder / "store"))
    hosts = Lossy(["a", "b"], {"b": ["fail"]}, store=store)
    places = [f"paths.output={folder / 'out'}", f"paths.logs={folder / 'logs'}"]
    keys = ["layout.nodes=2", "train.micro_batch=8", "gang.min_nodes=1", "train.steps=1", "optimizer.warmup_steps=0"]
    run = load("tiny", [*keys, *places])
    hosts.output = run.paths.output
    trace = Trace(lambda value: isinstance(value, Job | Gang), (Job, Run, Gang), "carry_out")  # a Gang has the Job
    sys.setprofile(trace)
    try:
        teller = Teller(History("gang", run.name, ""), folder / "none")
        fits: Any = {"fits": fewer_hosts(run), "advice": less_memory}
        controller.carry_out(
            Gang("gang", folder, Training(run), store, cast(Any, hosts), teller, print, lambda: False, **fits)
        )
    finally:
        sys.setprofile(None)
    trace.report("job")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="trace-") as name:
        gang(Path(name))
        flow(Path(name))
