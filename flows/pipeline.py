"""The pipeline: every stage with its inputs and condition, and the loop that runs them.

    download --> convert --> train --> export --> evaluate-tuned --> promote
             --> prepare --> (train, both evaluations)
             --> evaluate-base --> (promote)

A stage is a module in tasks/stages/ with a function `stage` and a Prefect task of the module's name. `stage` returns
the identity of the artifact: the configuration keys and the fingerprints of the inputs that it depends on. So all
fingerprints are known before any stage runs. The task makes the artifact, or ends as Cached if the store has it.
Each entry of `inputs` is a parameter of `stage` and of the task, with the stage that makes it. tasks/run/steps.py
explains the other fields. flows/run_flow.py plans a run before this loop starts, and reports its result.
"""

import contextlib
from queue import Empty, SimpleQueue
from typing import Any

from prefect import State, allow_failure
from prefect.futures import PrefectFuture

from conf.rules import objectives, packed_base, pretraining, reinforcement
from conf.schema.run import Run
from tasks.run.session import Session
from tasks.run.steps import Pipeline, Step, makers
from tasks.stages import convert, download, evaluate, export, pack, prepare, promote, reference, reinforce, train

AWAKE = 1.0  # seconds at most until a signal is handled


def no_evaluation(run: Run) -> str:
    return "" if run.evaluate.tasks else "evaluate.tasks is empty"


def no_base_evaluation(run: Run) -> str:
    return no_evaluation(run) or ("its weights are random" if pretraining.is_drawn(run) else "")


def no_training(run: Run) -> str:
    return "reinforce.start is base" if reinforcement.is_asked(run) and run.reinforce.start == "base" else ""


MODEL = {"model": "download"}
PROMPTS = ("prepare-prompts", "prepare")  # the first of these that the run has
SERVED = ("pack", "download")
JUDGE = ("convert-teacher", "convert")
TRAINED = ("reinforce", "train")
OF_TEACHER: dict[str, Any] = {"exists": objectives.has_teacher, "view": objectives.of_teacher}
OF_PROMPTS: dict[str, Any] = {"exists": reinforcement.has_prompts, "view": reinforcement.of_prompts}

PIPELINE = Pipeline(
    Step("download", download),
    Step("prepare", prepare, MODEL),
    Step("prepare-prompts", prepare, MODEL, options={"source": "reinforce.source"}, **OF_PROMPTS),
    Step("convert", convert, MODEL, gpus=True),
    Step("pack", pack, MODEL | {"base": "convert"}, exists=packed_base.is_served, skip=no_evaluation),
    Step("evaluate-base", evaluate, {"model": SERVED, "data": PROMPTS}, gpus=True, skip=no_base_evaluation),
    Step("download-teacher", download, **OF_TEACHER),
    Step("convert-teacher", convert, {"model": "download-teacher"}, gpus=True, **OF_TEACHER),
    Step(
        "reference",
        reference,
        {"base": JUDGE, "data": "prepare", "teacher": "download-teacher"},
        reads=MODEL,
        gpus=True,
        exists=objectives.has_reference,
    ),
    Step(
        "train",
        train,
        {"base": "convert", "data": "prepare", "reference": "reference"},
        reads=MODEL,
        after="evaluate-base",
        gpus=True,
        skip=no_training,
    ),
    Step(
        "reinforce",
        reinforce,
        {"base": "convert", "data": PROMPTS, "trained": "train"},
        reads=MODEL,
        gpus=True,
        exists=reinforcement.is_asked,
    ),
    Step("export", export, MODEL | {"trained": TRAINED}, reads={"base": "convert"}),
    Step(
        "evaluate-tuned",
        evaluate,
        {"model": "export", "data": PROMPTS, "trained": TRAINED, "before": "evaluate-base"},
        reads={"released": SERVED},
        may_fail="before",
        gpus=True,
        skip=no_evaluation,
    ),
    Step(
        "promote",
        promote,
        {"tuned": "export", "before": "evaluate-base", "after": "evaluate-tuned"},
        reads={"released": "download"},
        skip=no_evaluation,
    ),
)


def run_stages(session: Session) -> None:
    """Submit each stage's task as soon as its inputs are made. A stage whose inputs failed is not submitted."""
    names = session.request.stages
    futures: dict[str, PrefectFuture] = {}
    ended: dict[str, State] = {}
    finished = SimpleQueue[str]()
    while True:
        for step in (step for step in PIPELINE.steps if step.name in names and step.name not in futures):
            inputs, earlier = makers({**step.inputs, **step.reads}, names), session.earlier(step)
            needs = {maker: name != step.may_fail for name, maker in inputs.items()} | earlier  # True: must succeed
            if all(name in ended and (ended[name].is_completed() or not must) for name, must in needs.items()):
                made = {name: futures[name] if must else allow_failure(futures[name]) for name, must in needs.items()}
                arguments, waits = {name: made[maker] for name, maker in inputs.items()}, [*map(made.get, earlier)]
                futures[step.name] = step.task.submit(session.stage(step), **arguments, wait_for=waits)
                futures[step.name].add_done_callback(lambda _, name=step.name: finished.put(name))
        if len(ended) == len(futures):
            return
        name = _first(finished)
        futures[name].wait()  # from now on its state is known
        ended[name] = futures[name].state
        session.has_ended(name)


def _first(finished: SimpleQueue[str]) -> str:
    """Wait for the next name.

    A signal does not wake the main thread if the system delivers it to another thread, such as one that is starting a
    process. Python handles it when the main thread continues.
    """
    while True:
        with contextlib.suppress(Empty):
            return finished.get(timeout=AWAKE)
