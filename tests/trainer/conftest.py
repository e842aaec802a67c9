"""Tiny models, their data, and a process that has imported Megatron and runs trainer commands on forked ranks."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load
from tests.support import preloaded
from tests.support.ranks.gradients_of_run import make_data
from trainer.data import prepared
from trainer.data.write import packing
from trainer.rehearsal import tiny_models

CONF = """
name: test
model: {source: made by trainer.tiny, compare: false}
data: {seq_length: 64, template: "{input} {output}"}
adapter: {rank: 8, alpha: 16}
train: {steps: 6, global_batch: 4, precision: fp32}
optimizer: {lr: 5e-3}
checkpoint: {save_every: 100, background: false}  # a kill after a step finds the checkpoints of earlier steps
"""
DOWN = "linear_q_down_proj,linear_kv_down_proj"
UP = "linear_q_up_proj,linear_kv_up_proj,linear_proj"
TARGETS = {
    ("llama", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("glm4-moe", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("gpt-oss", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("deepseek-v3", "lora"): f"{DOWN},{UP},linear_fc1,linear_fc2",
    ("llama", "dora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("glm4-moe", "dora"): "linear_qkv,linear_proj",
    ("deepseek-v3", "dora"): UP,
}
IMPORT_VLLM = """
from pathlib import Path
from trainer.checks import inputs, places
from trainer.patches import vllm_cpu
from trainer.serving import agreement, engine, held_out, lm_tasks
from trainer.startup import entry
engine.prepare(Path("{}"), online=False)
with vllm_cpu.hidden():
    import lm_eval.models.vllm_causallms
    import vllm
"""
ALONE = "alone"  # the cut of one process
NEED_DATA = ("train", "train_detached", "masks", "gradients_of_run", "train_without", "train_to_nan", "collectives")
NEED_DATA += (
    "train_to_nan_gradient",
    "killed_load",
    "reference",
    "killed_reference",
    "train_unpacked",
    "frozen_experts",
    "train_dividing_at_the_clip",
    "train_in_chunks",
    "train_comparing_states",
    "train_with_slow_saves",
    "train_with_flips",
    "train_extended",
    "train_reading_ahead",
    "train_other_scales",
)


@pytest.fixture(scope="module", autouse=True)
def fork_to_prepare():
    """Have trainer/data/prepared.py prepare rows made by hand in forks of a process that has the imports.

    Most of the seconds that a process takes which is started for a few rows are imports. Tests of other folders that
    come later in the same session start processes as ever: the one that is forked has the environment of its start.
    """
    contexts, forks = multiprocessing.get_context, multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.support.for_preparation"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind=None: forks if kind == "spawn" else contexts(kind))
        yield


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "conf.yaml").write_text(CONF)
    tiny_models.make_data(folder / "data", rows=64)
    return folder


@pytest.fixture(scope="session")
def short_rows(work):
    """short_rows(folder) -> the folder with the training's rows, and ten short ones to evaluate on."""

    def short_rows(folder: Path) -> Path:
        rows = [json.loads(line) for line in (work / "data/training.jsonl").read_text().splitlines()]
        short = [row for row in rows if len(row["input"]) + len(row["output"]) < 60]
        folder.mkdir()
        for name, part in ("training", rows), ("test", short[:10]):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        return folder

    return short_rows


@pytest.fixture(scope="session")
def configure(work):
    """configure(model, *overrides) -> Run

    Rows go two at a time, unless told: of a step of a tiny model, most is Python around its tensors.
    """

    def configure(model: str, *overrides: str):
        if not (work / model).exists():
            tiny_models.make_model(model, work / model, dtype="float32")
        paths = [f"paths.model={work / model}", f"paths.base={work / model}-base", f"paths.data={work / 'data'}"]
        given = [*paths, "train.micro_batch=2"]
        mine = {override.split("=")[0] for override in overrides}
        return load(work / "conf.yaml", [one for one in given if one.split("=")[0] not in mine] + list(overrides))

    return configure


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """ranks(command, run, kill_at=None) -> its exit code, output and metrics. kill_at: the step after which all die."""
    logs = tmp_path_factory.mktemp("logs")
    server = subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "support" / "ranks" / "rank_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    count = 0
    made: dict[str, Path] = {}

    def call(command: str, run, kill_at: int | None = None) -> SimpleNamespace:
        nonlocal count
        count += 1
        if command in NEED_DATA:
            _prepare(run, made)
        log = logs / f"{count}-{command}.log"
        request = {"command": command, "run": run.model_dump(mode="json"), "log": str(log), "kill_at": kill_at}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = json.loads(server.stdout.readline())
        return SimpleNamespace(code=code, output=log.read_text(), metrics=read_metrics(run))

    yield call
    server.stdin.close()
    server.stdout.close()
    server.wait(30)


@pytest.fixture(scope="session")
def as_bridge(ranks):
    """as_bridge(folder, function, **arguments): the result of that function of as_bridge.py, called in the folder."""

    def as_bridge(folder: Path, function: str, **arguments):
        (folder / "request.json").write_text(json.dumps({"function": function, **arguments}))
        result = ranks("as_bridge", load("tiny", [f"paths.output={folder}"]))
        assert result.code == 0, result.output
        return json.loads((folder / "answer.json").read_text())

    return as_bridge


@pytest.fixture(scope="session")
def megatron_logits(ranks, tmp_path_factory):
    """megatron_logits(run, **asked): logits and weights that megatron_logits.py finds; None where Megatron refuses."""

    def megatron_logits(run, **asked) -> dict | None:
        import torch

        folder = tmp_path_factory.mktemp("logits")
        (folder / "request.json").write_text(json.dumps(asked))
        paths = run.paths.model_copy(update={"output": str(folder)})
        ranks("megatron_logits", run.model_copy(update={"paths": paths}))
        found = folder / "found.pt"
        return torch.load(found) if found.exists() else None

    return megatron_logits


@pytest.fixture
def unpatched(ranks, tmp_path):
    """unpatched(function, **arguments): the result of that function of unpatched.py."""

    def unpatched(function: str, **arguments):
        (tmp_path / "request.json").write_text(json.dumps({"function": function, **arguments}))
        result = ranks("unpatched", load("tiny", [f"paths.output={tmp_path}"]))
        assert result.code == 0, result.output
        return json.loads((tmp_path / "answer.json").read_text())

    return unpatched


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """evaluate(run, folder) -> code, output, errors and results of python -m trainer.evaluate, in a fork with vLLM."""
    home = tmp_path_factory.mktemp("hub")
    nowhere = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}  # nothing may be fetched
    with preloaded.python(IMPORT_VLLM.format(home), os.environ | nowhere | {"HF_HOME": str(home)}) as fork:

        def evaluate(run, folder: Path) -> SimpleNamespace:
            conf = folder / "resolved.json"
            conf.write_text(json.dumps(run.model_dump(mode="json")))
            done = fork("trainer.evaluate", conf)
            made = Path(run.paths.evaluation)
            results = made / "results.json"
            found = json.loads(results.read_text()) if results.exists() else None
            return SimpleNamespace(**vars(done), folder=made, results=found)

        yield evaluate


@pytest.fixture(scope="session")
def base(configure, ranks):
    """base(model): convert it once, at whatever layout."""
    done = set()

    def base(model: str) -> None:
        if model not in done:
            result = ranks("convert", configure(model))
            assert result.code == 0, result.output
            done.add(model)

    return base


@pytest.fixture(scope="session")
def compare(configure, base, ranks, work):
    """compare(model, kind, cut, packed, targets="", without=(), settings=()) -> what gradients_of_run.compare() found.

    `settings` are not those of the run that it is compared with. `policy` names a loss of reinforcement learning.
    """
    make_data(work / "rows")

    def compare(
        model: str, kind: str, cut: str, packed: bool, targets: str = "", without=(), settings=(), both=(), policy=""
    ) -> dict:
        base(model)
        name = "-".join([model, kind, *(["packed"] if packed else []), *targets.split(","), *both, policy])
        shared = [f"paths.data={work}/rows", "data.seq_length=128", f"data.packed={str(packed).lower()}"]
        shared += [
            "train.steps=3",
            "train.global_batch=2",
            "train.micro_batch=1",
            "optimizer.lr=1e-3",
            f"adapter.kind={kind}",
        ]
        shared += [f"adapter.targets=[{targets or TARGETS[model, kind]}]"] if kind != "none" else []
        shared += both
        reference = work / f"{name}.pt"
        if not reference.exists():
            ask(configure(model, *_last(shared), f"paths.output={work}/{name}"), reference, policy=policy)
        where = "-".join([name, *(cut.split() or ["copies"]), *settings, *without]).replace("layout.", "")
        ways = [] if cut == ALONE else ["layout.gpus_per_node=2", *cut.split()]
        there = f"paths.output={work}/{where}"
        return ask(configure(model, *_last([*shared, *settings, *ways]), there), reference, without, policy)

    def ask(run, reference: Path, without=(), policy="") -> dict:
        folder = Path(run.paths.output)
        folder.mkdir(exist_ok=True)  # of a comparison that another test has made too
        (folder / "request.json").write_text(
            json.dumps({"reference": str(reference), "without": without, "policy": policy})
        )
        result = ranks("gradients_of_run", run)
        assert result.code == 0, result.output[-4000:]
        return json.loads((folder / "answer.json").read_text())

    return compare


def _last(overrides: list[str]) -> list[str]:
    """Overrides without those that a later one of the same key takes the place of."""
    return list({one.partition("=")[0]: one for one in overrides}.values())


def _prepare(run, made: dict[str, Path]) -> None:
    """What trainer.train does before it starts ranks; done once for all runs whose data are the same."""
    multiple = packing.multiple(run) if run.data.packed else 0
    key = json.dumps([run.paths.data, run.paths.model, run.data.model_dump(mode="json"), multiple])
    folder = prepared.folder(run)
    there = key in made and made[key].exists()  # pytest removes the folders of tests that passed
    if there and not folder.exists():
        shutil.copytree(made[key], folder)
    elif not there:
        prepared.make(run)
        made[key] = folder
    prepared.check(run)


def read_metrics(run) -> list[dict]:
    path = Path(run.paths.output) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
