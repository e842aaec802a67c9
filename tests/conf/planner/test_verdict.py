"""conf/planner/verdict.py and display.py: whose facts a plan takes, and what it says."""

import json
from dataclasses import replace

import pytest

from conf import families
from conf.load import FOLDERS, load
from conf.model_facts import MODELS, facts_from_hf
from conf.planner import display, hardware
from conf.planner.hardware import GPUS
from conf.planner.verdict import facts_of, plan, settle, teacher_of
from conf.rules import objectives, packed_base
from contract.faults import ConfigError
from tests.support.known_models import known

H100 = GPUS["h100"]
BEHIND = ["evaluate-base", "train", "export", "evaluate-tuned"]


def of(source: str, *overrides: str):
    return load("glm47-as-documented", [f"model.source={source}", *overrides], illegal=True)


@pytest.mark.parametrize("name", [file.stem for file in MODELS.glob("*.json")])
def test_every_known_model_by_its_file_and_by_its_id(name):
    source = json.loads((MODELS / f"{name}.json").read_text())["source"]
    assert facts_of(of(name)) == known(name)
    if source.endswith(" config.json"):
        assert facts_of(of(source.split()[0])) == known(name)


@pytest.mark.parametrize("kind", families.tiny())
def test_every_tiny_model_by_its_name(kind):
    assert facts_of(of(f"tiny://{kind}")) == facts_from_hf(families.tiny()[kind])


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
    run = load("glm47-as-documented", ["layout.etp=1"])
    planned = plan(run, known("glm47"), H100)
    assert planned.legal and not planned.fits
    assert planned.verdict.startswith("refused: legal, but lacks 4")
    assert planned.instead and all(one.over <= 0 for one in planned.instead[""].fitting)
    said = list(display.lines(planned))
    assert said[-1] == planned.verdict and sum("fits, " in line for line in said) == 3
    assert "!|" in next(line for line in said if "<- fullest" in line)


def test_what_fits_is_not_searched_for():
    planned = plan(load("glm47-as-documented", ["data.seq_length=4096"]), known("glm47"), H100)
    assert planned.fits and not planned.instead
    assert planned.cut and (planned.cut.dp, planned.cut.edp) == (16, 2)


def test_hosts_that_a_gpu_does_not_come_in_are_planned_without_suggestions():
    run = load(
        "glm47-as-documented", ["layout.nodes=1", "layout.gpus_per_node=12", "train.global_batch=12"], illegal=True
    )
    planned = plan(run, known("glm47"), H100)
    assert planned.problems and not planned.instead
    assert "no layout was searched: gpus: 12 is neither" in "\n".join(display.lines(planned))


def test_programs_get_the_same_keys_whatever_the_verdict():
    kinds = [["data.seq_length=4096"], ["layout.etp=1"], ["layout.ep=7"]]
    plans = [
        display.as_dict(plan(load("glm47-as-documented", kind, illegal=True), known("glm47"), H100)) for kind in kinds
    ]
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


LONG = ("deepseek-v3-64-as-documented",)  # a long search for what fits instead, as others have that end sooner


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.slow if file.stem in LONG else (), id=file.stem)
        for folder in FOLDERS
        for file in sorted(folder.glob("*.yaml"))
    ],
)
def test_every_configuration_ends_in_a_plan_that_can_finish(file):
    """But for layouts as others have documented them, which need not fit; what they train could be evaluated."""
    run = load(file.stem, illegal=True)
    gpu, facts, teacher = hardware.of(run), facts_of(run), teacher_of(run)
    planned = plan(settle(run, facts, gpu, teacher), facts, gpu, teacher)
    assert planned.unserved == planned.unasked == ""
    behind = BEHIND if isinstance(run.model.source, str) else BEHIND[1:]  # drawn weights know nothing yet
    if run.reinforce.steps:
        behind = [*behind[:-2], "reinforce", *behind[-2:]]
    if objectives.has_reference(run):
        of_teacher = ["download-teacher", "convert-teacher"] if teacher else []
        behind = [*behind[:1], *of_teacher, "reference", *behind[1:]]
    if not run.evaluate.tasks:  # a packed base on GPUs that cannot serve the whole model
        behind = [stage for stage in behind if not stage.startswith("evaluate")]
    if packed_base.is_served(run):
        behind = ["pack", *behind]
    if file.parent.name != "documented":
        assert planned.fits and [need.stage for need in planned.needs][3:] == behind
        table = "\n".join(display.lines(planned))
        assert all(f"\n{stage} " in table for stage in behind)


def test_hosts_of_an_evaluation_are_chosen_with_the_plan():
    run, facts = load("glm47-as-documented"), known("glm47")
    planned = plan(settle(run, facts, H100), facts, H100)
    needs = {need.stage: need for need in planned.needs}
    assert (planned.run.evaluate.nodes, needs["evaluate-tuned"].hosts, needs["evaluate-base"].gpus) == (2, 2, 8)
    assert needs["convert"].gpus == 0 and needs["convert"].memory == 12e9  # on one host, without its GPUs
    over_all = load("glm47-as-documented", ["convert.hosts=all"])
    (spread,) = (one for one in plan(over_all, known("glm47"), H100).needs if one.stage == "convert")
    assert (spread.hosts, spread.gpus, spread.memory) == (over_all.layout.nodes, 8, 24e9)
    assert (spread.seconds or 0) < (needs["convert"].seconds or 0)
    said = list(display.lines(planned))
    assert any(line.startswith("serving  2 x 8 h100 in bf16, eager: each 45.5 GB weights") for line in said)
    one = load("glm47-as-documented", ["evaluate.quantization=fp8"])
    assert settle(one, facts, H100).evaluate.nodes == 1


def test_prices_of_all_stages_are_those_of_the_hosts_that_are_had():
    gpu = replace(H100, price=2.0)
    planned = plan(load("glm47-as-documented"), known("glm47"), gpu)
    for need in planned.needs:
        if need.seconds is not None:
            assert need.cost == pytest.approx(need.seconds / 3600 * need.hosts * 8 * 2.0)
    assert planned.needs[2].cost is None and display.whole(planned, planned.needs).endswith(" USD")


def test_a_model_that_no_host_of_the_run_serves_is_refused_in_words():
    run = load("glm47-as-documented", ["evaluate.nodes=1"])
    planned = plan(run, known("glm47"), H100)
    assert planned.legal and planned.unserved.startswith(
        "91.6 GB on each of 8 h100, 88.3 of them weights, and 15.1 GB are"
    )
    assert sum("also refused: evaluation: 91.6 GB" in line for line in display.lines(planned)) == 1
    without = plan(load("glm47-as-documented", ["evaluate.nodes=1", "evaluate.tasks=[]"]), known("glm47"), H100)
    assert without.unserved == "" and all("evaluate" not in need.stage for need in without.needs)


def test_packs_that_are_slower_than_unpacked_rows_are_reported():
    """Measured on an H100: 3,470 tokens/s in packs of 2,048, and 12,980 unpacked with micro batches of 4."""
    short = load("qwen3-30b-a3b-1xh100", ["data.seq_length=2048", "train.global_batch=32", "train.micro_batch=1"])
    slow = plan(short, known("qwen3-30b-a3b"), H100)
    assert slow.time and slow.unpacked and slow.unpacked.seconds < slow.time.likely / 3
    keys = f"train.micro_batch={slow.unpacked.train.micro_batch}"
    (line,) = (line for line in display.lines(slow) if line.startswith("packing"))
    assert line.startswith(f"packing  slower than unpacked rows with {keys}, which takes ")
    assert plan(slow.unpacked.applied(short), slow.facts, H100).unpacked is None
    assert plan(short.changed(data={"packed": False}), slow.facts, H100).unpacked is None
