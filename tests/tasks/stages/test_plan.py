"""tasks/stages/plan.py: a plan of what a source's config.json says, refused before anything else of it is fetched."""

import json
import shutil

import pytest

from conf.load import load
from conf.model_facts import MODELS
from conf.planner import display, picture, timing
from contract.amounts import dollars
from contract.faults import ConfigError, Fault
from flows.pipeline import PIPELINE
from tasks.run.artifact import Artifact, Stage
from tasks.stages import convert, plan, prepare, train
from tasks.store.folder import File
from tasks.tracking import report_plots
from tests.support import s3_server, stand_in_hub
from tests.support.small_model import write_shard

CONFIG = json.loads((MODELS / "glm47.json").read_text())["config"]


def why(check, planned, last: str | None) -> str:
    """The reason that a check of tasks/stages/plan.py gives against the stages up to `last`."""
    return check(planned, PIPELINE.asked(planned.run, last))


@pytest.fixture
def folder(tmp_path):
    """A release of 1 MB more than its config.json."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_shard(
        made / "model.safetensors", {"w": {"dtype": "U8", "shape": [2**20], "data_offsets": [0, 2**20]}}, bytes(2**20)
    )
    return made


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with stand_in_hub.serve(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def of(source: object, *overrides: str):
    return load("glm47", [f"model.source={source}", *overrides])


def test_of_the_hub_comes_config_json_and_nothing_else(hub, folder):
    first = hub.publish("models/org/glm", folder)
    planned = plan.settle(of("org/glm"))
    assert planned.fits and plan.refusal(planned) == ""
    assert {*hub.sent} == {"config.json"} and hub.sent["config.json"] < 10_000
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 200}))
    hub.publish("models/org/glm", folder)
    assert plan.refusal(plan.settle(of("org/glm"))).startswith("plan: legal, but lacks ")
    assert plan.settle(of("org/glm", f"model.revision={first}")).fits


def test_an_empty_file_of_weights_is_refused_and_a_folder_without_weights_is_planned(folder):
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(Fault, match=r"model\.safetensors: truncated: 0 bytes do not even hold the header"):
        plan.settle(of(folder))
    (folder / "model.safetensors").unlink()
    assert plan.settle(of(folder)).fits


def test_of_a_folder_and_of_s3(folder, s3_url, monkeypatch):
    assert plan.settle(of(folder)).fits
    client, bucket = s3_server.bucket_of_test(s3_url, monkeypatch, "models")
    client.upload_file(str(folder / "config.json"), bucket, "glm/config.json")
    client.close()
    assert plan.settle(of(f"s3://{bucket}/glm")).fits
    with pytest.raises(Fault, match=rf"^s3://{bucket}/other: contains no objects; check the bucket and the prefix"):
        plan.settle(of(f"s3://{bucket}/other"))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"config.json: quantization_config.weight_block_size is null, but FP8 weights need blocks",
        ),
        (
            {"architectures": ["PhimoeForCausalLM"]},
            "PhimoeForCausalLM is not converted or trained here: Megatron-Bridge 0.6 has no bridge for it; it has ",
        ),
        (
            {"use_sliding_window": True, "clip_qkv": 8.0},
            "config.json: use_sliding_window is true, which Megatron-Bridge does not read for Glm4MoeForCausalLM; "
            "config.json: clip_qkv is 8.0, which",
        ),
        ({"num_hidden_layers": -3}, "config.json: num_hidden_layers is -3, which is not a size from 1"),
        ({"num_attention_heads": "96"}, 'config.json: num_attention_heads is "96"'),
    ],
)
def test_what_cannot_be_planned_or_converted_is_one_line(folder, change, says):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises((Fault, ConfigError), match=f"^model.source: {folder}: {says}") as error:
        plan.settle(of(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 9999])
def test_a_damaged_config_json(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(Fault, match=r"its config\.json: (not readable as JSON|contains a list, not an object)"):
        plan.settle(of(folder))
    shutil.rmtree(folder)
    with pytest.raises(Fault, match="no such folder"):
        plan.settle(of(folder))


def test_what_does_not_fit_is_refused_in_a_line_that_mends_it(folder):
    one_stage = ["layout.pp=1", "layout.vpp=null"]
    refused = plan.refusal(plan.settle(of(folder, *one_stage)))
    assert refused.startswith("plan: legal, but lacks 4") and "\n" not in refused
    assert refused.endswith("; hardware.gate=warn continues nevertheless")
    better = refused.partition("This fits on 32 h100: ")[2].partition(", or ")[0].split()
    changed = [key.partition("=")[0] for key in better]
    assert plan.settle(of(folder, *[key for key in one_stage if key.partition("=")[0] not in changed], *better)).fits
    assert plan.refusal(plan.settle(of(folder, *one_stage, "hardware.gate=warn"))) == ""


def test_a_model_that_vllm_cannot_serve_is_refused_where_it_would_be_evaluated(folder):
    """On this host, whose vLLM is that for CPUs."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 24}))
    here = "gang.engine=local"
    planned = plan.settle(of(folder, here))
    refused = why(plan.unserved, planned, None)
    assert refused.startswith(f"plan: vLLM cannot serve {folder}: head_dim is 24, and on a CPU vLLM serves heads of 32")
    assert "This host has vLLM for CPUs, and hardware.gpu is h100: make setup EXTRA=gpu on its host" in refused
    assert refused.endswith(". evaluate.tasks=[] trains and exports it without evaluation, and promotes nothing")
    assert why(plan.unserved, planned, "train") == refused and why(plan.unserved, planned, "convert") == ""
    assert plan.any_refusal(planned, PIPELINE.asked(planned.run, None), here=False) == ""  # for a dry run
    assert why(plan.unserved, plan.settle(of(folder, here, "evaluate.tasks=[]")), None) == ""


def test_hosts_that_an_engine_finds_have_a_vllm_of_their_own(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 24}))
    assert why(plan.unserved, plan.settle(of(folder)), None) == ""


@pytest.fixture
def gpu_build(monkeypatch):
    monkeypatch.setattr(plan, "_is_cpu_build", lambda: False)


def test_an_evaluation_that_does_not_fit_is_refused_and_a_gate_lets_it_pass(folder, gpu_build):
    refused = why(plan.unserved, plan.settle(of(folder, "evaluate.nodes=1")), None)
    assert refused.startswith(f"plan: vLLM cannot serve {folder}: 91.6 GB on each of 8 h100, 88.3 of them weights")
    assert refused.endswith("promotes nothing; hardware.gate=warn continues nevertheless") and "\n" not in refused
    assert why(plan.unserved, plan.settle(of(folder, "evaluate.nodes=1", "hardware.gate=warn")), None) == ""
    assert why(plan.unserved, plan.settle(of(folder)), None) == ""


def test_no_gate_lets_an_evaluation_pass_that_the_gpu_cannot_do(folder, gpu_build):
    keys = ["evaluate.quantization=fp8", "hardware.gpu=a100", "hardware.gate=warn"]
    refused = why(plan.unserved, plan.settle(of(folder, *keys)), None)
    assert "which a100 does not support; null" in refused and "hardware.gate" not in refused


def test_no_gate_lets_an_illegal_layout_pass(folder):
    keys = ["layout.pp=32", "layout.vpp=null", "layout.tp=1", "layout.sp=false", "layout.ep=1", "hardware.gate=warn"]
    refused = plan.refusal(plan.settle(of(folder, *keys)))
    assert refused.startswith("plan: layout.pp: 32 ranks do not share 92 layers evenly")
    assert "hardware.gate" not in refused and "\n" not in refused


def test_full_fine_tuning_that_fits_nowhere_is_told_of_lora(folder):
    refused = plan.refusal(plan.settle(of(folder, "adapter.kind=none")))
    assert "No layout of 32 h100 fits with room; with adapter.kind=lora adapter.experts=shared does: " in refused


def test_auto_is_the_run_that_could_have_been_written_by_hand(folder):
    """In every way that counts: what stages get, what MLflow logs, all fingerprints."""
    planned = plan.settle(of(folder, "layout.auto=true"))
    run = planned.run
    assert planned.fits and not run.layout.auto and run.world == 32
    layout = {key: value for key, value in run.layout.model_dump(mode="json").items() if key != "auto"}
    keys = [f"layout.{key}={json.dumps(value)}" for key, value in layout.items()]
    train_keys = run.train.model_dump(mode="json", include={"micro_batch", "recompute", "recompute_modules"})
    keys += [f"train.{key}={json.dumps(value)}" for key, value in train_keys.items()]
    evaluation = run.evaluate.model_dump(mode="json", include={"nodes", "gpus", "expert_parallel", "eager"})
    keys += [f"evaluate.{key}={json.dumps(value)}" for key, value in evaluation.items()]
    by_hand = of(folder, *keys)
    assert by_hand == run
    assert _fingerprints(by_hand) == _fingerprints(run)


def test_hardware_bears_no_identity(folder):
    other = of(folder, "hardware.gpu=b200", "hardware.price=9", "hardware.gate=warn")
    assert _fingerprints(other) == _fingerprints(of(folder))


def test_auto_where_nothing_fits(folder):
    with pytest.raises(ConfigError, match=r"^layout.auto: no layout of 8 h100 is legal and fits; closest is does not"):
        plan.settle(of(folder, "layout.auto=true", "layout.nodes=1"))


def made(stage: str, seconds: float, size: int, **result: float) -> Artifact:
    return Artifact(Stage(stage, 1, {}), {"file": File(size, "", "")}, result, {"seconds": seconds})


def test_what_was_measured_stands_beside():
    planned = plan.settle(load("glm47-b200", ["model.source=tiny://glm4-moe", "layout.nodes=1", "layout.pp=1"]))
    train = made("train", 90.0, 10**9, median_step_seconds=2.0, peak_memory_gb=90.0)
    rows = plan.beside(planned, {"evaluate-base": made("evaluate", 40.0, 10**4), "train": train})
    assert [(name, measured) for name, _, measured in rows] == [
        ("seconds of a step", 2.0),
        ("GB that the fullest rank has allocated", 90.0),
        ("seconds of evaluate-base", 40.0),
        ("seconds of train", 90.0),
        ("GB on disk of train", 1.0),
    ]
    assert {"memory_gb", "allocated_gb", "step_seconds", "hours"} <= {*plan.numbers(planned)}


def test_a_cpu_is_this_host_and_its_time_is_an_estimate(monkeypatch):
    monkeypatch.setattr(timing, "cpu_flops", lambda: 1e11)
    planned = plan.settle(load("tiny", ["layout.gpus_per_node=2", "train.micro_batch=8"]))
    assert planned.time is None and planned.fits and planned.gpu.memory < planned.fullest.capacity * 2
    rows = plan.beside(planned, {"train": made("train", 9.0, 10**6, peak_memory_gb=1.0)})
    assert [name.split()[0] for name, _, _ in rows] == ["GB", "GB"] and "step_seconds" not in plan.numbers(planned)
    assert planned.cpu_step and 0.01 < planned.cpu_step < 1
    assert "about 0.091 s a step (0.046 to 0.18); 100 steps, about 9 s" in plan.summary(planned)
    monkeypatch.setattr(timing, "cpu_flops", lambda: 2e11)
    faster = plan.settle(planned.run).cpu_step
    assert faster == pytest.approx(planned.cpu_step / 2)


def test_a_cheap_run_costs_cents():
    planned = plan.settle(load("tiny", ["hardware.gpu=h100", "hardware.price=3"]))
    assert planned.time and planned.time.cost and 0 < planned.time.cost < 0.01
    said = [plan.summary(planned), plan.page(planned), *display.lines(planned)]
    assert not [text for text in said if " 0 USD" in text] and f"{dollars(planned.time.cost)} USD" in said[0]


def test_too_few_held_out_rows_are_warned_about():
    few = plan.settle(load("tiny", ["data.test=0.02"]))
    assert "warning: about 32 held-out rows can show only a gain of 0.16 or more" in "\n".join(display.lines(few))
    assert plan.settle(load("tiny")).noise == ""


def _fingerprints(run) -> list[str]:
    model = Stage("download", 1, {})
    base, data = convert.stage(run, model), Stage("prepare", prepare.VERSION, {})
    return [stage.fingerprint for stage in (base, train.stage(run, base, data))]


@pytest.mark.parametrize("overrides", [[], ["layout.nodes=128", "train.global_batch=512"]])
def test_its_figure(overrides):
    """Of 32 GPUs and of 1,024; an illegal layout has none."""
    planned = plan.settle(
        load("glm47-b200", ["model.source=tiny://glm4-moe", "layout.pp=4", "layout.ep=8", *overrides])
    )
    (image,) = report_plots.of_plan(json.loads(json.dumps(display.as_dict(planned)))).values()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    assert report_plots.of_plan({"stages": []}) == {}


def test_its_page_says_what_the_terminal_says():
    keys = ["model.source=tiny://glm4-moe", "layout.pp=2", "train.global_batch=16", "hardware.price=2"]
    planned = plan.settle(load("glm47-b200", keys))
    page = plan.page(planned)
    assert "legal and fits" in page and "| cost | " in page
    assert all(line in page for line in (*picture.lines(planned), *display.lines(planned)))


def test_a_teacher_that_cannot_be_asked_ends_the_run_before_anything_is_fetched():
    of_llama = ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"]
    keys = [f"{key}={name}" for key, name in zip(("model.source", "train.teacher"), of_llama, strict=True)]
    keys += ["hardware.gpu=h100", "train.precision=bf16", "adapter.kind=lora", "evaluate.tasks=[]"]
    planned = plan.recalled(load("tiny-distill", keys))
    assert planned.fits and plan.refusal(planned) == ""
    said = why(plan.unasked, planned, None)
    assert said.startswith(f"plan: train.teacher: {of_llama[1]}: it uses the layout of training, and lacks ")
    assert said.endswith("; hardware.gate=warn continues nevertheless") and why(plan.any_refusal, planned, None) == said
    assert why(plan.unasked, planned, "convert") == "", "the reference is not asked for"
    assert why(plan.unasked, plan.recalled(load("tiny-distill", [*keys, "hardware.gate=warn"])), None) == ""
    assert "| teacher refused |" in plan.page(planned)
    other = plan.recalled(load("tiny-distill", ["train.teacher=tiny://gpt2", "hardware.gate=warn"]))
    assert why(plan.unasked, other, None).startswith("plan: train.teacher: tiny://gpt2: a vocabulary of 500 tokens")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["train.objective=dpo"],
            "dpo reads rows with a chosen and a rejected answer, but tiny://tickets contains rows with",
        ),
        (["data.source=tiny://ranked-tickets"], "sft reads rows with one answer, or texts, but tiny://ranked-tickets"),
        (
            ["data.source=mine.jsonl", "data.shape=preference"],
            "sft reads rows with one answer, or texts, but mine.jsonl",
        ),
        (["train.objective=dpo", "data.source=tiny://ranked-tickets"], ""),
        (["train.objective=dpo", "data.source=mine.jsonl"], ""),
        (["data.source=tiny://ranked-tickets", "data.input=ticket", "data.output=chosen"], ""),
    ],
)
def test_rows_of_known_shape_that_training_would_refuse_are_refused_before_anything_is_fetched(keys, said):
    planned = plan.recalled(load("tiny", keys))
    found = why(plan.unfit, planned, None)
    assert found.startswith(f"train.objective: {said}") if said else found == ""
    assert why(plan.any_refusal, planned, None) == found and why(plan.any_refusal, planned, "prepare") == ""


RANKED = (
    "tiny://ranked-tickets contains rows with a chosen and a rejected answer; reinforce needs rows with a prompt and"
)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["reinforce.source=tiny://ranked-tickets"], f"reinforce.source: {RANKED} one answer"),
        (["reinforce.source=tiny://texts"], "reinforce.source: tiny://texts contains texts for pretraining; reinforce"),
        (
            ["data.source=tiny://ranked-tickets", "reinforce.source=null", "reinforce.start=base"],
            f"data.source: {RANKED} one answer, which reinforce.source may name",
        ),
        (
            ["reinforce.replay_experts=true", "model.source=tiny://llama"],
            "reinforce.replay_experts: true, but the model has no experts; false",
        ),
        ([], ""),
    ],
)
def test_what_reinforcement_learning_does_not_take_is_refused_before_anything_is_trained(keys, said):
    planned = plan.recalled(load("tiny-rl", keys))
    found = why(plan.any_refusal, planned, None)
    assert found.startswith(said) if said else found == ""
    assert why(plan.any_refusal, planned, "prepare-prompts") == ""


def test_a_teacher_s_config_json_is_read_where_it_lies(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "gelu"}))
    with pytest.raises(Fault, match=rf"^train.teacher: {folder}: config.json: hidden_act is \"gelu\", but"):
        plan.settle(load("tiny-distill", [f"train.teacher={folder}"]))
