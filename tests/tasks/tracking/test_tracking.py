import contextlib
import json
import logging
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from contract import processes
from contract.faults import Fault
from tasks import tracking
from tasks.tracking import __main__ as tracking_command
from tasks.tracking import journal, machine
from tasks.tracking.address import public
from tasks.tracking.outages import Away
from tasks.tracking.shipping import drain
from tasks.tracking.tail import Tail, metrics
from tests.support import preloaded
from tests.tasks.run.toy_flow import resume, write

ROOT = Path(__file__).parents[3]


class Server:
    """MLflow's own server on a database of its own, which can be killed and started again."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination",
            f"{self.folder}/a",
        ]
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1", *store]
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=self.folder, start_new_session=True
            )
        given_up = time.monotonic() + 120  # of a machine that is busy with other tests
        while self.process.poll() is None and time.monotonic() < given_up:
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
            time.sleep(0.1)
        self.kill()
        raise TimeoutError(f"MLflow's server does not start: {(self.folder / 'log').read_text()}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(server):
    from mlflow import MlflowClient

    return MlflowClient(server.uri)


@pytest.fixture
def start(tmp_path, server, monkeypatch):
    monkeypatch.setattr(tracking, "POLL", 0.1)

    def begin(flow: str, **more) -> tracking.Tracking:
        begun = tracking.start(tmp_path, more.pop("uri", server.uri), "toy", flow, flow, **more)
        begun.ship()
        return begun

    return begin


@pytest.fixture(scope="module")
def fork():
    with preloaded.python("import tasks.tracking.mlflow_sink") as fork:
        yield fork


@pytest.fixture
def flow(tmp_path, fork):
    """flow(uri, name, file, steps) -> a flow that only tracks, and the file that it prints to."""
    begun: list[preloaded.Started] = []

    def begin(uri: str, name: str, file: Path, steps: int) -> tuple[preloaded.Started, Path]:
        said = tmp_path / f"{name}.txt"
        begun.append(fork.start("tests.tasks.run.toy_flow", tmp_path, uri, name, file, steps, output=said))
        return begun[-1], said

    yield begin
    for process in begun:
        process.kill()
        process.wait(60)


def steps(client, run: str, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run, key))


def test_a_flow_and_its_stages(start, client, tmp_path):
    t = start("flow1", tags={"model": "tiny"}, params={f"key{i}": "v" * 7000 for i in range(150)})
    stage = t.stage("evaluate", tags={"fingerprint": "abc"}, params={"rows": 3})
    stage.metrics({"exact_match": 0.75, "nothing": None})
    stage.table([{"prompt": "a", "answer": "b"}, {"prompt": "c", "reference": float("nan")}], "evaluation.json")
    stage.dataset("rows", "d" * 64, "s3://user:secret@bucket/rows", "evaluation", 3)
    stage.model("tiny/base", "s3://bucket/base")
    stage.file(b"hello", "notes/hello.txt")
    stage.end("FAILED", "the answers are wrong")
    t.end("FAILED")
    assert t.close(30) is None

    parent, run = client.get_run(t.run_id()), client.get_run(t.run_id("evaluate"))
    assert len(parent.data.params) == 150 and parent.data.tags["model"] == "tiny" and parent.info.status == "FAILED"
    assert run.data.tags["finetune.parent"] == t.run_id()
    assert "mlflow.parentRunId" not in run.data.tags, "MLflow draws no curve of what is nested"
    assert run.data.tags["finetune.reason"] == "the answers are wrong"
    assert (run.data.metrics, run.data.params, run.info.status) == ({"exact_match": 0.75}, {"rows": "3"}, "FAILED")
    as_load_table_does = """tags.mlflow.loggedArtifacts LIKE '%"path"%:%"evaluation.json",%"type"%:%"table"%'"""
    assert [found.info.run_id for found in client.search_runs(["1"], as_load_table_does)] == [run.info.run_id]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "evaluation.json", str(tmp_path))).read_text())
    assert table == {"columns": ["prompt", "answer", "reference"], "data": [["a", "b", None], ["c", None, "nan"]]}
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.digest, json.loads(dataset.dataset.source)) == ("d" * 36, {"uri": "s3://bucket/rows"})
    assert len(run.inputs.model_inputs) == 1
    assert [file.path for file in client.list_artifacts(run.info.run_id, "notes")] == ["notes/hello.txt"]
    assert [*(tmp_path / "tracking").iterdir()] == []


def test_stages_without_a_run_of_their_own_stand_in_the_flow_s(start, client):
    t = start("flow10")
    for name, loss in (("evaluate-base", 7.0), ("evaluate-tuned", 0.5)):
        part = t.part(name)
        part.tags({"finetune.fingerprint": "abc"})
        part.metrics({"loss": loss})
        part.table([{"prompt": "a"}], "answers.json")
        part.end("FAILED", "wrong")
        part.end("KILLED")
    t.end()
    assert t.close(30) is None
    (run,) = client.search_runs(["1"], "tags.finetune.flow = 'flow10'")
    assert run.data.metrics["stages/evaluate-base/loss"] == 7 and run.data.metrics["stages/evaluate-tuned/loss"] == 0.5
    tags = {key: run.data.tags[f"finetune.evaluate-tuned.{key}"] for key in ("fingerprint", "state", "reason")}
    assert tags == {"fingerprint": "abc", "state": "FAILED", "reason": "wrong"} and run.info.status == "FINISHED"
    tables = {entry["path"] for entry in json.loads(run.data.tags["mlflow.loggedArtifacts"])}
    assert tables == {"evaluate-base/answers.json", "evaluate-tuned/answers.json"}
    assert client.get_experiment("1").tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_flow_that_found_everything_tells_nothing_and_ships_what_others_left(server, client, tmp_path, monkeypatch):
    handed = []
    monkeypatch.setattr(tracking.Tracking, "_hand_over", lambda *_: handed.append(drain(tmp_path / "tracking", 60)))
    tracking.start(tmp_path, server.uri, "toy", "found", "found").drop()
    assert not handed and not [*(tmp_path / "tracking").iterdir()]
    dead = tracking.start(tmp_path, server.uri, "toy", "killed", "killed")
    dead._journal.release()  # as at its death
    tracking.start(tmp_path, server.uri, "toy", "found", "found").drop()
    assert len(handed) == 1
    (run,) = client.search_runs(["1"], "tags.finetune.id = 'killed'")
    assert run.info.status == "KILLED" and not client.search_runs(["1"], "tags.finetune.id = 'found'")


def test_the_loss_is_the_first_section():
    line = {"kind": "train", "step": 1, "lm_loss": 1.0, "mtp_loss": 1.0, "aux_loss": 1.0, "lr": 1.0, "mfu": 0.4, "x": 1}
    names = sorted(name for name, *_ in metrics(line))
    assert names[:2] == ["loss/training", "loss/training_mtp"] and all("/" in name for name in names)


def test_metrics_of_a_training_and_its_figures(start, client, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "SAMPLE", 0.5)
    t, file = start("flow2"), tmp_path / "metrics.jsonl"
    stage = t.stage("train")
    stage.follow(file)
    write(file, 1, 30, 0.03)
    with file.open("a") as out:
        out.write(
            '{"kind": "train", "step": 31, "time": 1, "lm_loss": NaN, "grad_norm": -Infinity, "lr": null}\nhalf a l'
        )
    stage.end()
    assert t.close(30) is None

    run = t.run_id("train")
    assert steps(client, run, "loss/training") == [*range(1, 32)]
    assert steps(client, run, "loss/validation") == [5, 10, 15, 20, 25, 30]
    assert str({m.step: m.value for m in client.get_metric_history(run, "loss/training")}[31]) == "nan"
    assert client.get_metric_history(run, "utilization/cpu_utilization_percentage")
    figures = {Path(figure.path).name for figure in client.list_artifacts(run, "figures")}
    assert figures == {"loss.png", "learning_rate.png"}


def test_results_come_first_in_the_list_of_a_run(start, client, tmp_path):
    """MLflow lists metrics in the order of their arrival, those that begin with system/ above all others."""
    t = start("ordered")
    t.part("prepare").metrics({"seconds": 3})
    t.metrics_at_end({"plan/memory_gb": 1})
    t.metrics({"evaluation/tuned/held_out/exact_match": 0.5})
    t.end()
    assert t.close(30) is None
    assert [*client.get_run(t.run_id()).data.metrics] == [
        "evaluation/tuned/held_out/exact_match",
        "stages/prepare/seconds",
        "plan/memory_gb",
    ]
    assert not [name for name in machine.sample() if name.startswith("system/")]


def test_outage_delays_metrics_and_no_step(start, server, client, tmp_path):
    t, file = start("flow3"), tmp_path / "metrics.jsonl"
    stage = t.stage("train")
    stage.follow(file)
    before = write(file, 1, 40, 0.02)
    server.kill()
    try:
        during = write(file, 41, 120, 0.02)
        asked = time.monotonic()
        stage.metrics({"seconds": 2.0})
        assert time.monotonic() - asked < 0.2
    finally:
        server.start()
    write(file, 121, 140, 0.02)
    stage.end()
    t.end()
    assert t.close(30) is None
    assert steps(client, t.run_id("train"), "loss/training") == [*range(1, 141)]
    assert sorted(during)[40] < 1.2 * sorted(before)[20], "median of the step times"


def test_close_says_what_waits_and_the_next_flow_ships_it(start, server, client, tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://admin:hunter2@127.0.0.1:{nobody.getsockname()[1]}"
        t = start("flow4", uri=uri)
        t.stage("train").end()
        asked = time.monotonic()
        line = t.close(1.0)
        assert time.monotonic() - asked < 3
    assert line.startswith(f"tracking: 3 events for {public(uri)} wait in {tmp_path}/tracking/flow4-")
    assert "\n" not in line and "hunter2" not in line
    assert not [
        file for file in (tmp_path / "tracking").rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()
    ]


def test_a_flow_that_is_killed_says_what_waits_and_how_it_is_shipped(start, tmp_path, monkeypatch):
    handed = []
    monkeypatch.setattr(tracking.Tracking, "_hand_over", lambda self, *options: handed.append(options))
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        t = start("flow5", uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        t.stage("train").end()
        asked = time.monotonic()
        line = t.close(0.0, hand_over=True)
        assert time.monotonic() - asked < 3 and [options[0] for options in handed] == ["--after"]
    assert line.startswith("tracking: 3 events for http://127.0.0.1:")
    assert line.endswith(f"for 60 s, otherwise the next flow ships them, or python -m tasks.tracking {tmp_path}")


def test_killed_at_any_moment_and_started_again(server, client, tmp_path, flow):
    file = tmp_path / "metrics.jsonl"
    for attempt in range(3):
        process, said = flow(server.uri, f"killed{attempt}", file, 100_000)
        while not said.read_text():
            time.sleep(0.05)
        time.sleep(random.uniform(1.0, 3.0))
        process.kill()
        process.wait(60)
    last_step = json.loads(file.read_text().splitlines()[-1])["step"] + 10
    process, said = flow(server.uri, "last", file, last_step)
    assert (process.wait(60), said.read_text()) == (0, "tracking\ntold\n")

    found = client.search_runs(["1"], "tags.`finetune.id` = 'train-abc'")
    assert [run.info.status for run in found] == ["FINISHED"]
    assert steps(client, found[0].info.run_id, "loss/training") == [*range(1, last_step + 1)]
    assert steps(client, found[0].info.run_id, "loss/validation") == [*range(5, last_step + 1, 5)]
    parents = client.search_runs(["1"], "tags.`finetune.flow` LIKE 'killed%'")
    assert {run.info.status for run in parents if run.data.tags["mlflow.runName"] != "train"} == {"KILLED"}
    last = client.search_runs(["1"], "tags.`finetune.id` = 'last'")[0].info.run_id
    assert found[0].data.tags["finetune.parent"] == last
    assert [*(tmp_path / "tracking").iterdir()] == []


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_is_none_is_told_of(tmp_path, monkeypatch, capsys, name):
    """Nothing waits there, and it may wait elsewhere."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["tracking", str(tmp_path / name)])
    assert tracking_command.main() == 2
    said = f"error: {tmp_path / name}: no such folder; FINETUNE_RUNS names it, or it is runs/\n"
    assert capsys.readouterr() == ("", said)


def test_what_lives_is_left_alone(start, server, tmp_path):
    t = start("flow5")
    done = subprocess.run([sys.executable, "-m", "tasks.tracking", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nothing waits\n")
    t.end()
    assert t.close(30) is None


def test_a_flow_has_its_journal_until_its_last_thread_is_gone(tmp_path):
    """Its number belongs to a dead process from the moment on in which its first thread is gone."""
    code = "import ctypes, sys, threading, time\nfrom pathlib import Path\nfrom tasks.tracking import journal\n"
    code += "made = journal.create(Path(sys.argv[1]), 'flow', {'sinks': ['mlflow']})\n"
    code += "threading.Thread(target=time.sleep, args=(2,)).start()\nprint(made.folder, flush=True)\n"
    code += "ctypes.CDLL(None).pthread_exit(0)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as flow:
        folder = Path(flow.stdout.readline().strip())
        while processes.started(flow.pid):
            time.sleep(0.02)
        assert journal.is_held(folder) and not [*journal.dead(tmp_path)]
        flow.kill()
    assert not journal.is_held(folder)
    (left,) = journal.dead(tmp_path)
    left.release()


def test_a_run_taken_over_is_left_to_its_new_owner(start, client, tmp_path):
    first, second = start("flow6"), start("flow7")
    mine = first.stage("train", id="train-shared")
    mine.metrics({"loss": 3.0}, step=1)
    while not first.run_id("train-shared"):
        time.sleep(0.05)
    time.sleep(0.5)
    theirs = second.stage("train", id="train-shared")
    theirs.metrics({"loss": 3.5}, step=1)
    theirs.metrics({"loss": 2.0}, step=2)
    while not second.run_id("train-shared"):
        time.sleep(0.05)
    mine.metrics({"loss": 9.0}, step=3)
    mine.end("FAILED", "the lease is lost")
    assert first.close(30) is None
    theirs.end()
    assert second.close(30) is None
    history = client.get_metric_history(second.run_id("train-shared"), "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 2.0)]
    run = client.get_run(second.run_id("train-shared"))
    assert (run.info.status, run.data.tags["finetune.resumed_from"]) == ("FINISHED", first.run_id())


def test_what_mlflow_refuses_holds_up_nothing(start, client, caplog):
    t = start("flow8", params={"lr": 1})
    while t.run_id() is None:  # else both would go in one call
        time.sleep(0.05)
    t.params({"lr": 2, "batch": 4})
    t.tags({"a name with \t and \n": "x"})
    t.end()
    assert t.close(30) is None
    assert client.get_run(t.run_id()).data.params == {"lr": "1", "batch": "4"}
    assert "refuses lr" in caplog.text


@pytest.mark.slow
def test_two_processes_make_one_new_database(tmp_path, flow):
    uri, files = f"sqlite:///{tmp_path}/mlflow.db", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    both = [flow(uri, f"both{i}", file, 3) for i, file in enumerate(files)]
    assert [process.wait(90) for process, _ in both] == [0, 0]
    assert [said.read_text() for _, said in both] == ["tracking\ntold\n"] * 2


def test_a_file_replaced_half_written_and_late(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.lines() == []
    write(file, 1, 14, 0)
    seen = [*tail.lines()]
    with file.open("a") as out:
        out.write('{"kind": "train", "step": 15')
    assert tail.lines() == []
    file.write_text(file.read_text().rpartition("\n")[0] + "\n")
    assert resume(file) == 11
    write(file, 11, 20, 0)
    seen += tail.lines()
    counted = Counter((line["kind"], line["step"]) for line in seen)
    assert set(counted.values()) == {1} and [step for kind, step in counted if kind == "train"] == [*range(1, 21)]
    assert metrics({"kind": "train", "step": 1, "time": 2.0, "ok": True, "n": 3, "s": "x"}) == [
        ["other/n", 3.0, 2000, 1]
    ]


def test_wandb_mirrors_offline(start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    t, file = start("flow9", wandb="project"), tmp_path / "metrics.jsonl"
    stage = t.stage("train")
    stage.follow(file)
    write(file, 1, 5, 0)
    stage.end()
    assert t.close(60) is None
    assert len([*tmp_path.rglob("run-*.wandb")]) == 1


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "ftp://me:secret@host"])
def test_addresses_that_cannot_be(uri, tmp_path):
    with pytest.raises(Fault, match="not one of http") as fault:
        tracking.start(tmp_path, uri, "toy", "flow", "flow")
    assert "secret" not in str(fault.value)


def test_a_flow_that_ends_before_shipping_began_leaves_it_to_another_process(server, client, tmp_path):
    t = tracking.start(tmp_path, server.uri, "toy", "short", "short", tags={"finetune.short": "yes"})
    t.end("FINISHED")
    begun = time.monotonic()
    assert t.close() is None
    assert time.monotonic() - begun < 1
    for _ in range(300):
        if not [*(tmp_path / "tracking").iterdir()]:
            break
        time.sleep(0.1)
    (run,) = client.search_runs(["1"], "tags.finetune.short = 'yes'")
    assert run.info.status == "FINISHED"


def test_a_new_database_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    from tasks.tracking import mlflow_sink

    class Toy:
        def __init__(self, address, _):
            self.path = Path(address.removeprefix("sqlite:///"))

        def search_experiments(self, max_results):
            with self.path.open("a") as database:
                database.write("tables")

    class OnFullDisk(Toy):
        def search_experiments(self, max_results):
            super().search_experiments(max_results)
            raise OSError("(sqlite3.OperationalError) disk I/O error\n[SQL: \nCREATE TABLE spans (")

    database = tmp_path / "mlflow.db"
    monkeypatch.setattr(mlflow_sink, "MlflowClient", OnFullDisk)
    with pytest.raises(Away, match=r"disk I/O error \[SQL: CREATE TABLE"):
        mlflow_sink._client(f"sqlite:///{database}")
    assert not database.exists()
    monkeypatch.setattr(mlflow_sink, "MlflowClient", Toy)
    mlflow_sink._client(f"sqlite:///{database}")
    assert database.read_text() == "tables" * 2, "made anew beside its place, put there, and asked"


def test_what_the_database_refuses_is_told_once_and_without_a_traceback(tmp_path):
    """MLflow logs each error of its database with two tracebacks; tracking says it in a line, and tries again."""
    from tasks.tracking import mlflow_sink

    client = mlflow_sink._client(f"sqlite:///{tmp_path}/mlflow.db")
    client.search_experiments()
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("DROP TABLE experiment_tags")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("mlflow.store.db.utils")
    logger.addHandler(handler)
    try:
        with pytest.raises(Exception, match="no such table"):
            client.set_experiment_tag("0", "key", "value")
    finally:
        logger.removeHandler(handler)
    assert not records
