"""The flow as a user runs it, against real servers: S3, Prefect and MLflow over HTTP, Megatron-Bridge and vLLM."""

import resource
import shutil
import subprocess
import sys

import boto3
import pytest

from flows.finetune import finetune
from flows.run_command import command
from tests.support.core_speed import slowdown
from tests.support.flow_world import MARKER, ROOT, states, wait_for

STAGES = ["download", "prepare", "convert", "evaluate-base", "train", "export", "evaluate-tuned", "promote"]


@pytest.fixture(scope="module")
def bucket(place):
    names = {f"aws_{key}": place.environment[f"AWS_{key.upper()}"] for key in ("access_key_id", "secret_access_key")}
    client = boto3.client("s3", endpoint_url=place.environment["AWS_ENDPOINT_URL"], region_name="us-east-1", **names)
    yield client
    client.close()


@pytest.fixture
def dry_run(place, monkeypatch, capsys):
    """dry_run(*overrides) -> reason by stage that it would make; here, as a process takes 1.5 s to import Prefect."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)

    def dry_run(*overrides: str) -> dict[str, str]:
        monkeypatch.setattr(sys, "argv", ["flows.finetune", str(place.conf), "--dry-run", *overrides])
        code, said = command(finetune), capsys.readouterr()
        assert code == 0, said.err
        return misses(said.out)

    return dry_run


def objects(bucket, prefix: str) -> list[str]:
    pages = bucket.get_paginator("list_objects_v2").paginate(Bucket="finetune", Prefix=f"main/{prefix}")
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def misses(output: str) -> dict[str, str]:
    """Reason by stage that a dry run would make."""
    rows = [line.split(None, 3) for line in output.splitlines()]
    return {row[0]: row[3] for row in rows if len(row) == 4 and row[2] == "miss"}


def test_from_nothing_to_a_better_model(place, first):
    assert states(first) == dict.fromkeys(STAGES, "Completed")
    score = next(line.split() for line in first.splitlines() if line.startswith("held_out/exact_match"))
    assert float(score[1]) <= 0.1
    assert float(score[2]) >= 0.6
    assert "quick version 1: challenger and champion" in first
    assert "Traceback" not in first


def test_mlflow_has_each_step_once_and_every_stage(place, first):
    from mlflow import MlflowClient

    client = MlflowClient(place.mlflow)
    (parent,) = client.search_runs(["1"], f"tags.`mlflow.runName` = '{place.name_of(first)}'")
    (train,) = client.search_runs(["1"], f"tags.finetune.parent = '{parent.info.run_id}'")
    assert train.data.tags["finetune.stage"] == "train"
    assert {run.info.status for run in (parent, train)} == {"FINISHED"}
    history = client.get_metric_history(train.info.run_id, "loss/training")
    assert [metric.step for metric in sorted(history, key=lambda m: m.step)] == list(range(1, 51))
    assert parent.data.params["optimizer.lr"] == "0.005"
    spent = {name: value for name, value in train.data.metrics.items() if name.startswith("time/")}
    assert len(spent) == 10 and 0 < spent["time/effective"] < 1
    assert spent["time/training_hours"] > 0 == spent["time/lost_hours"] == spent["time/repeated_hours"]
    assert "time.png" in {item.path for item in client.list_artifacts(train.info.run_id)}
    assert train.inputs.dataset_inputs
    figures = {item.path for item in client.list_artifacts(train.info.run_id, "figures")}
    assert {"figures/loss.png", "figures/learning_rate.png", "figures/gradient_norm.png"} <= figures
    kept = {item.path for folder in ("", "figures") for item in client.list_artifacts(parent.info.run_id, folder)}
    assert {"plan.json", "figures/plan.png"} <= kept
    found = parent.data.metrics
    assert found["plan/allocated_gb"] > 0 and found["speed/memory_gb"] > 0 and found["loss/training"] > 0
    assert found["stages/prepare/rows_kept"] == 1600 and 0 < found["stages/prepare/learned_share"] < 1
    parts = ("", "figures", "prepare", "evaluate-tuned")
    kept = {item.path for folder in parts for item in client.list_artifacts(parent.info.run_id, folder)}
    assert {"prepare/report.json", "figures/token_lengths.png", "evaluate-tuned/answers.json"} <= kept
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("**quick version 1** is challenger and champion: held_out/exact_match ")
    assert "| held_out/exact_match | " in note and "/runs/flow-run/" in note
    version = client.get_model_version_by_alias("quick", "champion")
    assert version.source.startswith("s3://finetune/main/export/")
    assert "against" in version.tags["reason"]
    assert version.run_id == train.info.run_id and f"flows.serve quick@{version.version}" in (version.description or "")
    assert str(version.description).startswith("held_out/exact_match ")
    assert f"Path: `{version.source}`" in str(version.description) and "/runs/flow-run/" in str(version.description)


def test_prefect_has_the_report(place, first):
    (run,) = place.ask_prefect("flow_runs/filter", flow_runs={"name": {"any_": [place.name_of(first)]}})
    assert run["state_name"] == "Completed"
    tasks = place.ask_prefect("task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})
    assert {task["state_name"] for task in tasks} == {"Completed"}
    assert {task["name"] for task in tasks} == {"plan", *STAGES}
    updates = place.ask_prefect("events/filter", filter={"event": {"name": ["prefect.artifact.updated"]}})
    assert updates["total"] == 0, "each is a line of --watch that shows a UUID"
    reports = place.ask_prefect("artifacts/filter", flow_runs={"id": {"any_": [run["id"]]}})
    (data,) = [report for report in reports if report["key"] == "data-quick"]
    assert "| `tiny://tickets` | pairs |" in data["data"]
    (planned,) = [report for report in reports if report["key"] == "plan-quick"]
    assert "legal and fits" in planned["data"] and "stage 0" in planned["data"]
    reports = [report for report in reports if report["key"] == "report-quick"]
    assert "| GB that the fullest rank has allocated | " in reports[0]["data"]
    page = reports[0]["data"]
    assert "held_out/exact_match" in page and "| prompt | tuned | reference | base |" in page
    assert "python -m flows.serve quick@1" in page and "  source: tiny://tickets" in page
    assert "/model-metrics?workflowType=machine_learning>)" in page and "compareRunsMode=CHART" in page
    assert "data:image/png;base64," in reports[0]["data"]
    assert "% effective: " in page and "| training | time | GPU hours | USD |" in page


def test_again_all_is_there_without_a_local_copy_and_mlflow_gets_no_run(place, first):
    from mlflow import MlflowClient

    shutil.rmtree(place.folder / "runs")
    client = MlflowClient(place.mlflow)
    before = len(client.search_runs(["1"]))
    again = place.run()
    assert states(again) == dict.fromkeys(STAGES, "Cached")
    assert len(client.search_runs(["1"])) == before and "MLflow, curves of the training: http" in again


@pytest.mark.parametrize(
    "change, made",
    [
        ([], []),
        (["optimizer.lr=1e-3"], STAGES[4:]),
        (["evaluate.max_tokens=4"], ["evaluate-base", "evaluate-tuned", "promote"]),
        (["promote.margin=0.5"], ["promote"]),
        (["export.formats=[merged]"], STAGES[5:]),
        (["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "train.micro_batch=8"], []),
        (["model.mtp=false"], ["convert", *STAGES[4:]]),
        (["data.rows=500"], ["prepare", "evaluate-base", *STAGES[4:]]),
        (["data.template='{input}: {output}'"], ["prepare", "evaluate-base", *STAGES[4:]]),
        (["data.packed=true", "train.micro_batch=1"], ["prepare", "evaluate-base", *STAGES[4:]]),
        (["data.processes=1", "data.workers=1"], []),
        (["train.global_batch=32"], STAGES[4:]),
    ],
)
def test_a_change_makes_what_follows_from_it_and_nothing_else(first, dry_run, change, made):
    assert list(dry_run(*change)) == made


def test_a_comment_changes_nothing_and_a_miss_names_the_field(place, first, dry_run):
    before = place.conf.read_text()
    place.conf.write_text("# a comment\n" + before)
    assert dry_run() == {}
    place.conf.write_text(before)
    assert "optimizer.lr: 0.005 -> 0.001" in dry_run("optimizer.lr=1e-3")["train"]


def test_a_lost_and_a_damaged_artifact_are_made_again_and_no_other(place, first, bucket, dry_run):
    lost = next(key for key in objects(bucket, "convert/") if key.endswith(".distcp"))
    damaged = next(key for key in objects(bucket, "download/") if key.endswith("config.json"))
    bucket.delete_object(Bucket="finetune", Key=lost)
    body = bytearray(bucket.get_object(Bucket="finetune", Key=damaged)["Body"].read())
    body[0] ^= 1
    bucket.put_object(Bucket="finetune", Key=damaged, Body=bytes(body))
    reasons = dry_run()
    assert list(reasons) == ["download", "convert"]
    assert "config.json: content differs" in reasons["download"]
    assert ".distcp: missing" in reasons["convert"]
    found = states(place.run())
    assert [name for name, state in found.items() if state == "Completed"] == ["download", "convert"]
    assert found["train"] == found["promote"] == "Cached"


def test_what_does_not_fit_ends_before_anything_is_downloaded(place, tmp_path):
    gpu = tmp_path / "small.yaml"
    gpu.write_text("{name: small, memory: 1, bf16: 1, hbm: 100, link: 10, network: 1, per_host: 1}")
    own = {"FINETUNE_STORE": str(tmp_path / "store"), "FINETUNE_RUNS": str(tmp_path / "runs")}
    output = place.run(f"hardware.gpu={gpu}", code=2, **own)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: plan: legal, but lacks 2.") and "on small" in error
    assert not [*tmp_path.glob("store/*")] and not [*tmp_path.glob("runs/*")] and "Traceback" not in output
    output = place.run(f"hardware.gpu={gpu}", "hardware.gate=warn", "--until", "download", **own)
    assert states(output)["download"] == "Completed" and "legal, but lacks" in output


def test_auto_is_settled_before_any_stage(place, first):
    """Of two processes on this host; what bears identity is as written by hand, so that all is there already."""
    output = place.run("layout.auto=true", "layout.gpus_per_node=2", "--dry-run")
    assert misses(output) == {} and "plan  legal and fits" in output


@pytest.mark.slow
def test_a_training_that_is_killed_goes_on_and_mlflow_has_each_step_once(place, first):
    from mlflow import MlflowClient

    killed = place.start("optimizer.lr=3e-3", "--until", "train")
    work = place.folder / "runs/work"
    wait_for(lambda: [f for f in work.glob("train-*/files/metrics.jsonl") if '"step": 30,' in f.read_text()], 120)
    killed.kill()
    killed.communicate()
    place.run("optimizer.lr=3e-3", "--until", "train")
    client = MlflowClient(place.mlflow)
    runs = client.search_runs(["1"], "tags.finetune.stage = 'train' and params.`optimizer.lr` = '0.003'")
    assert [run.info.status for run in runs] == ["FINISHED"]
    history = client.get_metric_history(runs[0].info.run_id, "loss/training")
    assert sorted(metric.step for metric in history) == list(range(1, 51))
    spent = {name: runs[0].data.metrics[f"time/{name}_hours"] for name in ("training", "saving", "idle")}
    assert all(hours > 0 for hours in spent.values()), spent


@pytest.mark.parametrize(
    "override, line",
    [
        ("model.source=nobody/nothing", "nobody/nothing"),
        ("data.source=/no/such.jsonl", "/no/such.jsonl"),
        ("data.test=0.00001", "none of 1600 rows is in test"),
        ("evaluate.tasks=[held_outt]", "held_out"),
        ("model.mtp=false layout.gpus_per_node=16 layout.ep=16 train.micro_batch=1", "layout.ep"),  # converting
        ("optimizer.lr=7e-3 layout.gpus_per_node=16 layout.ep=16 train.micro_batch=1", "layout.ep"),  # training
        pytest.param("export.checkpoint=7", "export.checkpoint: 7", marks=pytest.mark.slow),
        ("promote.metric=held_out/nonsense", "held_out/exact_match"),
    ],
)
def test_a_fault_is_one_line(place, first, override, line):
    output = place.run(*override.split(), "--until", "promote", code=2, HF_ENDPOINT="http://127.0.0.1:9")
    errors = [text for text in output.splitlines() if text.startswith("error: ")]
    assert errors and all(line in error for error in errors)
    assert "Traceback" not in output and "NotReady" not in output


def test_no_secret_is_kept_anywhere(place, first, bucket):
    keys = objects(bucket, "")
    kept = {key: bucket.get_object(Bucket="finetune", Key=key)["Body"].read() for key in keys}
    kept |= {str(path): path.read_bytes() for path in place.folder.rglob("*") if path.is_file()}
    assert len(kept) > 100
    assert [name for name, content in kept.items() if MARKER.encode() in content] == []


def test_import_is_light():
    code = "import flows.finetune, sys; assert not {'torch', 'mlflow', 'boto3', 'datasets'} & set(sys.modules)"
    slower, before = slowdown(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    took = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    assert took < 5 * max(slower, slowdown())  # 2.5 s on an idle machine: make bench-flow
