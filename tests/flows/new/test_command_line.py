"""python -m flows.new: what it writes, what it asks, and what it refuses, all of it at once and with nothing written.

What reads the rows is a process, and is replaced here; one slow test runs what was written through a whole flow.
"""

import io
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from conf import load as conf_load
from conf.load import load
from contract.faults import Fault
from contract.first_rows import FirstRows
from flows import deploy, plan
from flows.new import __main__ as new
from flows.new import deployment, rows
from tests.support import small_model
from tests.support.flow_world import ROOT

FIRST = FirstRows(
    kind="pairs",
    reason="wrote -> input, to -> output: from the configuration",
    columns={"input": "wrote", "output": "to"},
    rows=300,
    whole=True,
    read=300,
    tokens=[30, 40, 50] * 100,
    answers=[3, 4, 5] * 100,
    guessed="their order",
    places=[number / 300 for number in range(300)],
    template="plain",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A model, rows and a project of its own, whose host has no GPU."""
    small_model.write(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"head_dim": 32, "max_position_embeddings": 512}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "desk.csv").write_text("wrote,to\na b,c\n" * 150)
    (tmp_path / "conf/own").mkdir(parents=True)
    monkeypatch.setattr(new, "FOLDER", tmp_path / "conf")
    monkeypatch.setattr(new, "OWN", tmp_path / "conf/own")
    monkeypatch.setattr(new, "DEPLOYMENTS", tmp_path / "prefect.own.yaml")
    monkeypatch.setattr(new.machine.nvidia_smi, "visible", lambda: ())
    monkeypatch.setattr(new.rows, "look", lambda run, tokenizer, folder: FIRST)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_is_planned_and_has_a_deployment(place, capsys):
    assert new.main(["model", "desk.csv", "--name", "desk"]) == 0
    said = capsys.readouterr().out
    assert "wrote conf/own/desk.yaml, and the deployment finetune/desk" in said
    assert re.findall(r"-m (flows\.\w+) desk", said) == [
        "flows.plan",
        "flows.finetune",
        "flows.finetune",
        "flows.serve",
        "flows.deploy",
    ]
    run = load(place / "conf/own/desk.yaml")
    assert (run.model.source, run.data.source) == (f"{place}/model", f"{place}/desk.csv")  # for a worker elsewhere
    assert (run.data.input, run.data.output, run.hardware.gpu, run.world) == ("wrote", "to", "cpu", 1)
    text = (place / "conf/own/desk.yaml").read_text()
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" +\w+: ", line)]
    assert len(keys) > 20
    for number in keys:
        assert " # " in lines[number] or lines[number - 1].startswith("  # ")
    assert max(len(line) for line in lines if str(place) not in line) <= 120
    assert text.startswith("# yaml-language-server: $schema=../schema.json\n")
    assert plan.main([f"{place}/conf/own/desk.yaml"]) == 0
    entry = yaml.safe_load((place / "prefect.own.yaml").read_text())["deployments"][-1]
    assert (entry["name"], entry["parameters"]) == ("desk", {"conf": "desk"})
    assert (
        entry["concurrency_limit"]["collision_strategy"] == "ENQUEUE" and entry["work_pool"]["name"] == "finetune-cpu"
    )


def test_a_file_elsewhere_has_no_deployment(place, capsys):
    assert new.main(["model", "desk.csv", "--name", "own/desk.yaml"]) == 2
    assert "own: no such folder" in capsys.readouterr().err
    assert new.main(["model", "desk.csv", "--name", "./desk.yaml"]) == 0
    assert load(place / "desk.yaml").name == "desk" and not (place / "prefect.own.yaml").exists()
    assert "flows.deploy" not in capsys.readouterr().out


def test_what_a_user_adds_is_in_no_file_that_git_tracks(place):
    assert new.main(["model", "desk.csv", "--name", "desk"]) == 0
    written = [path.relative_to(place) for path in (place / "conf/own/desk.yaml", place / "prefect.own.yaml")]
    listed = subprocess.run(["git", "check-ignore", *written], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.split() == [str(path) for path in written]
    assert new.OWN.relative_to(place) == conf_load.OWN.relative_to(ROOT) and ROOT / written[1] == deploy.OWN


def test_a_configuration_of_an_earlier_version_stays_where_it_is(place, capsys):
    (place / "conf/desk.yaml").write_text("mine")
    assert new.main(["model", "desk.csv", "--name", "desk"]) == 2
    assert "error: --name: conf/desk.yaml: exists already" in capsys.readouterr().err
    assert new.main(["model", "desk.csv", "--name", "desk", "--force"]) == 0
    assert load(place / "conf/desk.yaml").name == "desk" and not [*(place / "conf/own").iterdir()]


def test_written_paths_have_no_dots(place, monkeypatch):
    (place / "below").mkdir()
    monkeypatch.chdir(place / "below")
    assert (
        new.main(
            ["../model", "../below/../desk.csv", "evaluate.tasks=[held_out, ../task.yaml]", "--name", "../desk.yaml"]
        )
        == 0
    )
    run = load(place / "desk.yaml")
    assert (run.model.source, run.data.source) == (f"{place}/model", f"{place}/desk.csv")
    assert run.evaluate.tasks == ("held_out", f"{place}/task.yaml")


def test_nothing_is_replaced_unless_asked(place, capsys):
    (place / "conf/own/desk.yaml").write_text("mine")
    assert new.main(["model", "desk.csv", "--name", "desk"]) == 2
    assert capsys.readouterr().err == (
        "error: --name: conf/own/desk.yaml: exists already; --force replaces it, another name keeps it\n"
    )
    assert (place / "conf/own/desk.yaml").read_text() == "mine"
    assert new.main(["model", "desk.csv", "--name", "desk", "--force"]) == 0
    assert new.main(["model", "desk.csv", "--name", "desk", "--force"]) == 0
    assert load(place / "conf/own/desk.yaml").name == "desk"
    assert (place / "prefect.own.yaml").read_text().count("- name: desk\n") == 1


def test_printed_it_is_the_file_alone_and_nothing_is_written(place, capsys):
    before = sorted(place.rglob("*"))
    for option in ("--print", "--dry-run"):
        assert new.main(["model", "desk.csv", option]) == 0
        said = capsys.readouterr()
        assert yaml.safe_load(said.out)["name"] == "model-desk" and "would write" in said.err
    assert sorted(place.rglob("*")) == before


def test_all_that_is_wrong_is_said_at_once(place, capsys, monkeypatch):
    monkeypatch.setattr(new.rows, "look", rows.look)
    arguments = ["./modle", "desc.csv", "--name", "Desk", "--gpus", "8xfoo", "optimizer.lrr=1", "adapter.rank=x"]
    assert new.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    wanted = (
        "--name: 'Desk': use a-z, 0-9 and -, such as desk",
        "override optimizer.lrr=1: optimizer.lrr: unknown key; did you mean optimizer.lr?",
        "--gpus: 'foo' is not one of a100",
        'override adapter.rank=x: adapter.rank: "x" is not an integer',
        "model.source: ./modle: no such folder; did you mean model?",
        "data.source: desc.csv: no such file",
    )
    assert len(lines) == len(wanted)
    for line in wanted:
        assert any(line in one for one in lines)


def test_without_a_terminal_nothing_is_asked(place, capsys):
    assert new.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: MODEL: missing; {new.MODEL}", f"error: DATA: missing; {new.DATA}"]


def test_on_a_terminal_it_asks_for_what_is_missing(place, capsys, monkeypatch):
    answers = io.StringIO("\nmodel\ndesk.csv\n\nhelp\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert new.main([]) == 0
    asked = capsys.readouterr().err
    assert asked.count("Model (") == 2 and "Name [model-desk]" in asked and "none on this host" in asked
    assert load(place / "conf/own/help.yaml").name == "help"


def test_an_end_of_input_ends_it(place, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", answers := io.StringIO("model\n"))
    answers.isatty = lambda: True
    assert new.main([]) == 130
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not converted or trained here"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            'quant_method is "gptq", but only fp8, compressed-tensors, mxfp4, modelopt are supported',
        ),
        ({"sliding_window": 64, "use_sliding_window": True}, "the converted model would compute another function"),
        ({"hidden_size": None}, "config.json: hidden_size is null, which is not a size"),
    ],
)
def test_models_that_cannot_be_trained(place, capsys, change, complaint):
    config = json.loads((place / "model/config.json").read_text()) | change
    (place / "model/config.json").write_text(json.dumps(config))
    assert new.main(["model", "desk.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model.source: ") and complaint in line


@pytest.mark.parametrize(
    "lost, complaint",
    [
        ("model-00001-of-00002.safetensors", ""),
        ("tokenizer*", "no tokenizer (tokenizer.json)"),
        ("config.json", "has no config.json"),
    ],
)
def test_folders_that_lack_something(place, capsys, lost, complaint):
    for file in (place / "model").glob(lost):
        file.unlink()
    assert new.main(["model", "desk.csv"]) == (2 if complaint else 0)
    assert complaint in capsys.readouterr().err


def test_a_folder_without_weights_is_planned_and_one_with_an_empty_file_is_not(place, capsys):
    for file in (place / "model").glob("*.safetensors*"):
        file.unlink()
    assert new.main(["model", "desk.csv"]) == 0
    assert f"note: {place}/model holds no weights: the configuration can be planned" in capsys.readouterr().err
    (place / "model/model.safetensors").touch()
    assert new.main(["model", "desk.csv", "--force"]) == 2
    assert "model.safetensors: truncated: 0 bytes do not even hold the header" in capsys.readouterr().err


def test_too_few_gpus_are_answered_with_how_many_would_do(place, capsys):
    source = json.loads((ROOT / "conf/models/qwen3-235b.json").read_text())["config"]
    (place / "model/config.json").write_text(json.dumps(source))
    assert new.main(["model", "desk.csv", "--gpus", "4xh100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is legal and fits on 4 h100; the closest does not fit by" in line and "8 h100 would do" in line


@pytest.mark.parametrize(
    "given, complaint",
    [
        ("name=x", "name: use --name"),
        ("data.source=x.csv", "data.source: use DATA"),
        ("paths.output=x", "paths.output: the flow sets all paths"),
        ("optimizer.warmup_steps=500", "optimizer.warmup_steps: 500 leaves none of the 225 steps for the decay"),
        ("train.micro_batch=3", "train.global_batch: 8 is not a multiple of micro_batch 3"),
        ("layout.tp=3", "layout.tp: 3 does not divide the 1 processes"),
    ],
)
def test_keys_that_do_not_go_with_the_rest(place, capsys, given, complaint):
    assert new.main(["model", "desk.csv", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {complaint}")
    assert not [*(place / "conf").rglob("*.yaml")]


def test_a_layout_that_was_asked_for_is_not_searched_for(place):
    assert new.main(["model", "desk.csv", "--gpus", "2xcpu", "layout.ep=2", "--name", "desk"]) == 0
    layout = load(place / "conf/own/desk.yaml").layout
    assert (layout.gpus_per_node, layout.ep, layout.tp) == (2, 2, 1)


def test_a_full_disk_leaves_nothing_behind(place, capsys, monkeypatch):
    write = new.write_atomically

    def full(path, text, durable):
        if path.parent.name == "own":
            raise OSError(28, "No space left on device", str(path))
        write(path, text, durable=durable)

    monkeypatch.setattr(new, "write_atomically", full)
    assert new.main(["model", "desk.csv", "--name", "desk"]) == 2
    assert capsys.readouterr().err == f"error: {place}/conf/own/desk.yaml: No space left on device\n"
    assert not (place / "prefect.own.yaml").exists() and not [*(place / "conf/own").iterdir()]


def test_a_file_of_deployments_of_another_form_is_left_alone():
    with pytest.raises(Fault, match=r"prefect.own.yaml: must have a list"):
        deployment.with_deployment("name: x\n", "desk", "Desk.", True)
    closed = deployment.with_deployment("", "other", "Other.", True) + "more: 1\n"
    with pytest.raises(Fault, match=r"no entry can be added"):
        deployment.with_deployment(closed, "desk", "Desk.", True)


def test_a_deployment_is_added_once_and_its_words_are_quoted():
    text = deployment.with_deployment("# mine\ndeployments:\n", "other", "Other.", True)
    once = deployment.with_deployment(text, "desk", "Llama: 'ours' # and yours", cuda=True)
    assert once.startswith(text) and deployment.with_deployment(once, "desk", "other", cuda=False) == once
    entry = yaml.safe_load(once)["deployments"][-1]
    assert entry["description"] == "Llama: 'ours' # and yours" and entry["tags"] == ["gpu"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_written_runs_through_the_whole_flow(tmp_path):
    """Rows and model of one's own, with names that nobody knows, on this CPU."""
    named = ("billing", "shipping", "returns", "accounts")
    lines = [f"T-{n},this is about {named[n % 4]} and order {n},{named[n % 4]}\n" for n in range(300)]
    (tmp_path / "desk.csv").write_text("ref,customer wrote,goes to\n" + "".join(lines))
    python = [sys.executable, "-m"]
    own = {"FINETUNE_RUNS": f"{tmp_path}/runs", "PREFECT_HOME": f"{tmp_path}/prefect", "NO_COLOR": "1"}
    without = {name: value for name, value in os.environ.items() if name not in ("FINETUNE_STORE", "PREFECT_API_URL")}
    environment = without | own
    subprocess.run([*python, "trainer.tiny", "qwen3-moe", tmp_path / "model"], cwd=ROOT, check=True)
    command = [*python, "flows.new", tmp_path / "model", tmp_path / "desk.csv", "--name", tmp_path / "desk.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    command = [*python, "flows.finetune", tmp_path / "desk.yaml"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "desk version 1: challenger and champion" in done.stdout + done.stderr
