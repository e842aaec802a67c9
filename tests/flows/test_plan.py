"""flows/plan.py: every preset by its name, the layouts that others have documented, and faulty calls."""

import json
import resource
import subprocess
import sys

import pytest

from conf.load import FOLDER
from conf.model_facts import MODELS
from conf.planner.hardware import GPUS
from flows.plan import main
from tests.support.flow_world import ROOT

IMPORTS = 0.55  # seconds that they take on an idle core
SIX = {
    "1": [],
    "dp2": ["layout.gpus_per_node=2", "train.global_batch=64"],
    "tp2": ["layout.gpus_per_node=2", "layout.tp=2", "train.global_batch=64", "train.micro_batch=64"],
    "tp2 sp": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "train.global_batch=64"],
    "cp2": ["layout.gpus_per_node=2", "layout.cp=2", "train.global_batch=64", "train.micro_batch=64"],
    "pp2": ["layout.gpus_per_node=2", "layout.pp=2", "train.global_batch=64", "train.micro_batch=64"],
}
GPUS_OF = {
    "tiny": "cpu",
    "tiny-rl": "cpu",
    "tiny-dpo": "cpu",
    "tiny-distill": "cpu",
    "tiny-pretrain": "cpu",
    "glm47-b200": "b200",
    "gpt2-large": "h200",
    "gpt2-large-as-documented": "h200",
}
# exit code, dp and edp
PRESETS = {
    "tiny": (0, 1, 1),
    "tiny-rl": (0, 1, 1),
    "tiny-dpo": (0, 1, 1),
    "tiny-distill": (0, 1, 1),
    "tiny-pretrain": (0, 1, 1),
    "llama-125m": (0, 1, 1),
    "llama31-8b-1xl4": (0, 1, 1),
    "llama31-8b-1xl40s": (0, 1, 1),
    "qwen3-8b-1xl40s": (0, 1, 1),
    "qwen3-30b-a3b-1xl40s": (0, 1, 1),
    "llama31-8b-1xh100": (0, 1, 1),
    "qwen3-30b-a3b-1xh100": (0, 1, 1),
    "qwen3-8b-1xh100": (0, 1, 1),
    "qwen3-30b-a3b-1xh200": (0, 1, 1),
    "qwen3-32b-1xh200": (0, 1, 1),
    "glm45-air-8xh100": (0, 8, 1),
    "llama31-70b-8xh100": (0, 2, 4),
    "llama31-8b-full-8xh100": (0, 4, 4),
    "qwen3-30b-a3b-8xh100": (0, 8, 1),
    "glm45-air-8xh200": (0, 8, 1),
    "qwen3-235b-8xh200": (0, 8, 1),
    "qwen3-30b-a3b-full-8xh200": (0, 8, 1),
    "glm45-air-16xh100": (0, 8, 1),
    "glm47-16xh200": (0, 16, 2),
    "glm47-4xh200": (0, 4, 1),
    "glm47-2xh200": (0, 2, 1),
    "glm47-4xh100": (0, 4, 1),
    "glm45-air-1xh100": (0, 1, 1),
    "qwen3-235b-4xh100": (0, 4, 1),
    "deepseek-v3-8xh200": (0, 8, 1),
    "minimax-m25-4xh100": (0, 4, 1),
    "minimax-m27-4xh200": (0, 4, 1),
    "minimax-m21-8xh200": (0, 8, 1),
    "qwen3-next-80b-4xh100": (0, 4, 1),
    "qwen35-35b-1xh100": (0, 1, 1),
    "nemotron3-nano-1xh100": (0, 1, 1),
    "nemotron3-super-4xh100": (0, 4, 1),
    "gemma3-27b-1xh100": (0, 1, 1),
    "gemma3-12b-1xl40s": (0, 1, 1),
    "gemma4-26b-1xh100": (0, 1, 1),
    "gemma4-31b-2xh100": (0, 1, 2),
    "glm47": (0, 8, 2),
    "glm47-as-documented": (1, 16, 2),
    "glm47-b200": (0, 8, 1),
    "deepseek-v3-64": (0, 8, 1),
    "deepseek-v3-64-as-documented": (1, None, None),
    "deepseek-v3-512": (0, 128, 1),
    "qwen3-235b": (0, 16, 4),
    "qwen3-235b-as-documented": (1, None, None),
    "mixtral-8x7b": (0, 4, 1),
    "mixtral-8x7b-as-documented": (0, 4, 1),
    "qwen2-moe": (0, 2, 1),
    "gpt2-large": (0, 1, 1),
    "gpt2-large-as-documented": (0, 1, 1),
    "llama31-70b": (0, 4, 16),
    "llama31-70b-as-documented": (1, 1, 8),
    "llama31-405b": (0, 1, 8),
    "llama31-405b-as-documented": (1, None, None),
}

REFUSED = ("deepseek-v3-64-as-documented", "qwen3-235b-as-documented")  # which tests of their own are about


@pytest.fixture(autouse=True)
def cheapest_is_not_searched(monkeypatch):
    """tests/conf/planner/test_cheapest.py does. It would take as long as the rest of a plan."""
    monkeypatch.setattr("flows.plan.with_cheapest", lambda planned, *_: planned)


@pytest.fixture
def bf16(tmp_path):
    """Where a copy of DeepSeek-V3 in bf16 would lie, as far as a plan reads it."""
    config = json.loads((MODELS / "deepseek-v3.json").read_text())["config"]
    del config["quantization_config"]
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16/config.json").write_text(json.dumps(config))
    return tmp_path / "bf16"


@pytest.fixture
def ask(capsys):
    def ask(*arguments: str):
        code = main([*arguments, "--json"])
        said = capsys.readouterr()
        assert said.err == ""
        return code, json.loads(said.out)

    return ask


@pytest.mark.parametrize("name", ["deepseek-v3-64", "deepseek-v3-512"])
def test_a_release_in_fp8_is_planned_as_it_is_downloaded(ask, capsys, bf16, name):
    """By the Hub's page, the files of DeepSeek-V3-0324 have 689 GB."""
    _, planned = ask(name)
    disk = {need["stage"]: need["disk"] / 1e9 for need in planned["stage_needs"]}
    assert disk["download"] == pytest.approx(689, rel=0.01) and disk["convert"] > 1300
    main([name, f"model.source={bf16}", "--json"])
    of_copy = json.loads(capsys.readouterr().out)
    assert (of_copy["grid"], of_copy["fits"]) == (planned["grid"], planned["fits"])


def test_a_format_that_is_not_read_is_refused(capsys, bf16):
    config = json.loads((bf16 / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (bf16 / "config.json").write_text(json.dumps(config))
    assert main(["deepseek-v3-64", f"model.source={bf16}"]) == 2
    said = capsys.readouterr()
    assert 'quant_method is "awq", but only fp8, compressed-tensors, mxfp4, modelopt are supported' in said.err
    assert said.err.count("\n") == 1
    assert said.out.splitlines()[-1].startswith("also refused: the model cannot be converted")


def test_a_function_that_would_be_lost_is_refused(capsys, tmp_path):
    config = json.loads((MODELS / "qwen3-235b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    assert main(["qwen3-235b", f"model.source={tmp_path}"]) == 2
    assert "config.json: use_sliding_window is true, but Megatron-Bridge builds" in capsys.readouterr().err
    assert main(["qwen3-235b", f"model.source={tmp_path}", "model.ignore_config=[use_sliding_window]"]) == 0


def test_every_preset_is_expected_somehow():
    files = FOLDER.rglob("*.yaml")
    assert {file.stem for file in files if file.parent.name not in ("bases", "tables")} == {*PRESETS}


@pytest.mark.parametrize(
    "name, expected",
    [pytest.param(name, found, marks=pytest.mark.slow if name in REFUSED else ()) for name, found in PRESETS.items()],
)
def test_a_preset(ask, name, expected):
    code, planned = ask(name)
    cut = planned["grid"] or {"dp": None, "edp": None}
    assert (code, cut["dp"], cut["edp"]) == expected
    assert (planned["name"], planned["fits"]) == (name, code == 0)
    count, _, kind = name.rpartition("-")[2].partition("x")  # as in 8xh100
    assert planned["gpu"] == GPUS_OF.get(name, kind if kind in GPUS else "h100")
    assert kind not in GPUS or planned["gpus"] == int(count)


def test_what_a_seed_cannot_do_comes_with_layouts_that_fit(ask):
    planned = ask("deepseek-v3-64-as-documented")[1]
    assert planned["problems"][0].startswith("layout.ep: etp 1 * ep 32 * pp 16 = 512 does not divide the 64 processes")
    for one in planned["instead"]["layouts"]:  # 12 TB do not fit into 5.4, but for what hosts hold
        assert one["offload"] == 1 and "less than the error of a plan" in one["verdict"]
    suggested = planned["instead_with_lora"]["layouts"]
    assert len(suggested) == 3
    one = suggested[1]
    degrees = [f"layout.{key}={json.dumps(value)}" for key, value in one["layout"].items()]
    again = [f"train.recompute={one['recompute']}", f"train.recompute_modules={json.dumps(one['recompute_modules'])}"]
    again += ["model.mtp=false"]  # as documented
    code, again = ask("deepseek-v3-64", *degrees, *again, f"train.micro_batch={one['micro_batch']}")
    assert (code, max(stage["total"] for stage in again["stages"])) == (0, one["memory"])


def test_qwen3_needs_etp_1_and_more_memory(ask):
    refused = ask("qwen3-235b-as-documented")[1]
    assert refused["problems"][0].startswith("layout.pp: etp 4 * ep 4 * pp 8 = 128 does not divide the 32 processes")
    code, legal = ask("qwen3-235b-as-documented", "layout.etp=1")
    assert (code, legal["legal"], legal["fits"], legal["grid"]["edp"]) == (1, True, False, 1)
    assert "lacks 8" in legal["verdict"]


def test_405b_is_refused_with_its_reasons(ask):
    documented = " ".join(ask("llama31-405b-as-documented")[1]["problems"])
    assert "layout.pp: 16 ranks do not share 126 layers evenly" in documented
    assert "layout.vpp: pp 16 * vpp 32 = 512 stages do not share 126 layers" in documented
    code, even = ask("llama31-405b", "layout.last_stage_layers=null")
    assert (code, even["problems"][0].partition(" evenly")[0]) == (1, "layout.pp: 32 ranks do not share 126 layers")
    virtual = ask("llama31-405b", "layout.vpp=32")[1]["problems"]
    assert any(line.startswith("layout.vpp: 32 does not divide the layers of each") for line in virtual)


@pytest.mark.parametrize("name", ["gpt2-large", "gpt2-large-as-documented"])
@pytest.mark.parametrize("layout", SIX.values(), ids=SIX)
def test_the_study_of_gpt2(ask, name, layout):
    assert ask(name, "--gpu", "h200", *layout)[0] == 0


@pytest.mark.parametrize(
    "nodes, keys",
    [
        (1, ["layout.pp=1", "train.recompute=full"]),
        (2, ["layout.pp=2"]),
        (8, ["layout.tp=2", "layout.sp=true"]),
    ],
)
def test_glm47_on_other_numbers_of_hosts_of_b200(ask, nodes, keys):
    code, planned = ask("glm47-b200", f"layout.nodes={nodes}", *keys)
    assert (code, planned["grid"]["dp"]) == (0, 8)


def test_a_faster_layout_is_named_by_keys_that_give_it(ask, capsys):
    slow = ["layout.tp=8", "layout.pp=2", "train.recompute=full"]
    assert main(["llama31-70b", *slow]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("faster ")]
    words, _, keys = line.partition(" GB left: ")
    assert words.startswith("faster   3.") and " times, 0.991 s a step, 10.4" in words
    assert {*keys.split()} == {"layout.tp=4", "layout.pp=1", "train.recompute=none"}  # as the preset has them
    code, planned = ask("llama31-70b")
    assert (code, planned["faster"], round(planned["time"]["likely"], 3)) == (0, None, 0.991)
    assert main(["llama31-70b"]) == 0
    assert "\nfaster   no layout of 16 h100 that leaves room was found\n" in capsys.readouterr().out


def test_the_largest_runs_are_not_compared(capsys):
    assert main(["llama31-70b", "layout.nodes=1024", "train.global_batch=2048"]) == 0
    assert "\nfaster   not searched beyond 4096 GPUs; --gpus 8192 does\n" in capsys.readouterr().out


def test_people_see_the_fullest_gpu_and_the_cost(capsys):
    assert main(["llama31-405b", "--price", "2"]) == 0
    said = capsys.readouterr().out
    (marked,) = [line for line in said.splitlines() if "<- fullest" in line]
    assert marked.split()[:3] == ["0", "0-7", "4"]
    assert " USD at 2 per GPU and hour" in said and "\nconvert " in said and "\nserving  2 x 8 h100" in said
    assert said.splitlines()[-1].startswith("legal and fits: stage 0, ")


def test_a_layout_costs_in_the_search_what_it_costs_by_itself(ask):
    one = ask("glm47", "--gpus", "32", "--top", "1", "--price", "3")[1]["layouts"][0]
    degrees = [f"layout.{key}={json.dumps(value)}" for key, value in one["layout"].items()]
    choice = [f"train.recompute={one['recompute']}", f"train.micro_batch={one['micro_batch']}"]
    choice += [f"optimizer.offload={one['offload']}"]
    planned = ask("glm47", *degrees, *choice, "--price", "3")[1]
    assert planned["time"]["cost"] == pytest.approx(one["cost"])
    assert planned["time"]["likely"] == pytest.approx(one["seconds"])


def test_search_ranks_and_gives_reasons(ask, capsys):
    code, found = ask("glm47", "--gpus", "32", "--top", "4")
    assert (code, len(found["layouts"])) == (0, 4)
    seconds = [one["seconds"] for one in found["layouts"]]
    assert seconds == sorted(seconds) and found["fitting"] >= 4 and found["reasons"]
    assert all(one["cost"] > 0 for one in found["layouts"])
    assert ask("qwen3-235b", "--gpus", "2")[0] == 1
    assert main(["qwen3-235b", "--gpus", "2"]) == 1
    assert "no layout of 2 h100 is legal and fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["nope"], "no such configuration: nope; it is a file, or one of "),
        (["glm47", "layout.epp=2"], "override layout.epp=2: layout.epp: unknown key; did you mean layout.pp?"),
        (["glm47", "layout.tp=-2"], "override layout.tp=-2: layout.tp: -2 is too small: it must be at least 1"),
        (["glm47", "model.source=org/none"], "model.source: org/none: unknown model; known are "),
        (["glm47", "--gpus", "-8"], "--gpus: -8 is not a number of GPUs from 1 to 65536"),
        (["glm47", "--gpus", "0"], "--gpus: 0 is not a number"),
        (["glm47", "--gpus", "999999999999"], "--gpus: 999999999999 is not a number"),
        (["glm47", "--gpus", "12"], "gpus: 12 is neither up to 8"),
        (["glm47", "layout.nodes=65536"], "override layout.nodes=65536: layout.nodes: 65536 x 8 is more than "),
        (
            ["glm47", "layout.auto=true", "layout.nodes=9000"],
            "override layout.nodes=9000: layout.nodes: 9000 x 8 is more",
        ),
        (["glm47", "--gpu", "h1000"], "hardware.gpu: 'h1000' is not one of a100, h100"),
        (["glm47", "layout.gpus_per_node=16"], "layout.gpus_per_node: 16, but one host of h100 has 8"),
        (["glm47", "--price", "-1"], "--price: -1 is no price"),
        (["glm47", "--price", "nan"], "--price: nan is no price"),
        (["glm47", "--top", "0"], "--top: 0 is too small"),
    ],
)
def test_a_faulty_call_is_one_line(capsys, arguments, complaint):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {complaint}") and said.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["glm47", "--gpus", "many"], ["glm47", "--gpsu", "8"]])
def test_what_argparse_refuses_is_one_line_too(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_a_layout_file_with_a_typo(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((FOLDER / "glm47.yaml").read_text().replace("  etp: 1", "  ept: 1"))
    assert main([str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file}: layout.ept: unknown key; did you mean layout.ep?\n"


def test_a_gpu_of_one_s_own_with_a_typo(capsys, tmp_path):
    file = tmp_path / "gpu.yaml"
    file.write_text("{name: x, memory: 40, bf16: 300, hmb: 2000, hbm: 2000, link: 300, network: 25, per_host: 8}")
    assert main(["glm47", "--gpu", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file}: hmb: unknown key; did you mean hbm?\n"


def test_auto_is_the_best_layout_and_says_so_where_there_is_none(ask, capsys):
    code, planned = ask("glm47", "layout.auto=true")
    best = ask("glm47", "--gpus", "32", "--top", "40")[1]["layouts"]
    roomy = next(one for one in best if "error of a plan" not in one["verdict"])
    assert (code, planned["layout"], planned["time"]["likely"]) == (0, roomy["layout"], roomy["seconds"])
    code, none = ask("glm47", "layout.auto=true", "layout.nodes=1")
    assert (code, none["layouts"], none["gpus"]) == (1, [], 8) and none["closest"]["over"] > 0
    assert main(["glm47", "layout.auto=true", "layout.nodes=1"]) == 1
    assert "no layout of 8 h100 is legal and fits" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["auto", "{auto: true, nodes: 1}", "{auto: true, tp: 3, ep: 7}"])
def test_auto_alone_is_one_host_of_the_gpu(ask, tmp_path, layout):
    file = tmp_path / "mine.yaml"
    text = (FOLDER / "glm47-b200.yaml").read_text()
    head, _, rest = text.partition("\nlayout:\n")
    file.write_text(f"{head}\nlayout: {layout}\n\nhardware:{rest.partition('hardware:')[2]}")
    code, planned = ask(str(file))
    assert (code, planned["gpus"], planned["layout"]["auto"]) == (0, 8, False)


@pytest.mark.parametrize("name, code", [("glm47", 0), ("llama31-405b", 0), ("qwen2-moe", 0)])
def test_a_plan_takes_two_seconds(name, code):
    """Two seconds of a core at most, and more if the imports also take longer than usual.

    What else a host does takes caches from Python, which a loop does not feel. Of three the least counts.
    """
    assert any(_seconds_of_an_idle_core(name, code) < 2 for _ in range(3))


def _seconds_of_an_idle_core(name: str, code: int) -> float:
    imports = [_core_seconds("-c", "import flows.plan")]
    seconds = _core_seconds("-m", "flows.plan", name, code=code)
    imports.append(_core_seconds("-c", "import flows.plan"))
    return seconds / max(1, max(imports) / IMPORTS)


def _core_seconds(*arguments: str, code: int = 0) -> float:
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
