"""conf/planner/verdict.py and display.py: whose facts a plan takes, and what it says."""

import json

import pytest

from conf.load import load
from conf.model_facts import MODELS, known
from conf.planner import display
from conf.planner.hardware import GPUS
from conf.planner.verdict import facts_of, plan
from contract.faults import ConfigError

H100 = GPUS["h100"]


def of(source: str, *overrides: str):
    return load("glm47", [f"model.source={source}", *overrides], illegal=True)


@pytest.mark.parametrize("name", [file.stem for file in MODELS.glob("*.json")])
def test_every_known_model_by_its_file_and_by_its_id(name):
    source = json.loads((MODELS / f"{name}.json").read_text())["source"]
    assert facts_of(of(name)) == known(name)
    if source.endswith(" config.json"):
        assert facts_of(of(source.split()[0])) == known(name)


def test_a_folder_s_config_json(tmp_path):
    config = json.loads((MODELS / "llama31-70b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for run in (of(str(tmp_path)), of("org/mine", f"paths.model={tmp_path}")):
        assert facts_of(run) == known("llama31-70b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"num_hidden_layers": -1}',
        '{"num_hidden_layers": 1e9}',
        "null",
        '{"architectures": 3}',
        "\udcff",
        "[" * 9999,
    ],
)
def test_a_config_json_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as fault:
        facts_of(of(str(tmp_path)))
    assert str(tmp_path) in str(fault.value) and "\n" not in str(fault.value)


def test_an_unknown_model_is_told_what_is_known():
    with pytest.raises(
        ConfigError, match=r"^model.source: org/x: unknown model; known are .*zai-org/GLM-4.7.*a folder"
    ):
        facts_of(of("org/x"))


def test_what_does_not_fit_is_refused_with_what_does():
    run = load("glm47", ["layout.etp=1"])
    planned = plan(run, known("glm47"), H100)
    assert planned.legal and not planned.fits
    assert planned.verdict.startswith("refused: legal, and lacks 3")
    assert planned.found and all(one.over <= 0 for one in planned.found.fitting)
    said = list(display.lines(planned))
    assert said[-1] == planned.verdict and sum("fits, " in line for line in said) == 3
    assert "!|" in next(line for line in said if "<- fullest" in line)


def test_what_fits_is_not_searched_for():
    planned = plan(load("glm47"), known("glm47"), H100)
    assert planned.fits and planned.found is None
    assert planned.cut and (planned.cut.dp, planned.cut.edp) == (16, 2)


def test_hosts_that_a_gpu_does_not_come_in_are_planned_without_suggestions():
    run = load("glm47", ["layout.nodes=1", "layout.gpus_per_node=12", "train.global_batch=12"], illegal=True)
    planned = plan(run, known("glm47"), H100)
    assert planned.problems and planned.found is None
    assert "nothing was searched for: gpus: 12 is neither" in "\n".join(display.lines(planned))


def test_programs_get_the_same_keys_whatever_the_verdict():
    kinds = [["layout.etp=2"], ["layout.etp=1"], ["layout.ep=7"]]
    plans = [display.as_dict(plan(load("glm47", kind, illegal=True), known("glm47"), H100)) for kind in kinds]
    assert len({tuple(one) for one in plans}) == 1
    assert [(one["legal"], one["fits"]) for one in plans] == [(True, True), (True, False), (False, False)]
    assert json.loads(json.dumps(plans, allow_nan=False)) == json.loads(json.dumps(plans))
    stage = plans[0]["stages"][0]
    assert sum(value for key, value in stage.items() if key not in ("rank", "total", "over")) == stage["total"]


def test_a_bar_is_as_long_as_what_a_gpu_has():
    for name in ("llama31-405b", "glm47", "deepseek-v3-64"):
        run = load(name)
        rows = [line for line in display.lines(plan(run, facts_of(run), H100)) if line.count("|") == 2]
        assert len(rows) == run.layout.pp
        assert {len(row.split("|")[1]) for row in rows} == {display.BAR}
