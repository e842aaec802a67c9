"""conf/rules/shipping.py: exports in 8 and 4 bits, their loss, and how they are evaluated."""

import json

import pytest

from conf.load import load
from conf.model_facts import MODELS
from conf.rules import conversion, serving
from conf.schema.export import Export
from contract.faults import ConfigError
from tasks.run.artifact import Stage
from tasks.stages import evaluate
from tests.support.known_models import known

BF16 = "evaluate.precision=bf16"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "export.quantization=int4 export.formats=[adapter]",
            "int4, but export.formats lacks merged",
        ),
        ("export.quantization=int4 evaluate.quantization=fp8 " + BF16, "export.quantization rounds weights already"),
        ("export.gguf=q8_0 export.formats=[adapter]", "export.gguf: q8_0, but export.formats lacks merged"),
        ("export.gguf=bf16 export.quantization=int4", "export.gguf: bf16, but export.quantization int4 leaves codes"),
        ("export.max_loss=0.1", "export.max_loss: 0.1, but export.quantization rounds no merged weights"),
        ("export.quantization=fp8 export.max_loss=0.1 evaluate.tasks=[]", "and evaluate.tasks is empty"),
        ("export.quantization=fp8 export.max_loss=0.1 evaluate.parity_rows=0", "and evaluate.parity_rows is 0"),
        (
            "export.quantization=fp8 export.max_loss=0.1 evaluate.adapter=unmerged",
            "unmerged serves another form",
        ),
        ("export.quantization=fp8 export.max_loss=0", "export.max_loss: "),
    ],
)
def test_what_does_not_go_together_is_named(overrides, says):
    with pytest.raises(ConfigError) as raised:
        load("tiny", overrides.split())
    assert says in str(raised.value)


def test_a_base_is_evaluated_once_for_all_formats_as_released():
    def evaluation(form: str, trained: bool):
        run = load("tiny", [*f"export.quantization={form}".split(), BF16])
        parts = [Stage(name, 1, {}, {}) for name in ("download", "prepare", "train")]
        return evaluate.stage(run, parts[0], parts[1], *parts[2:] if trained else ()).fingerprint

    assert evaluation("fp8", False) == evaluation("int4", False) != evaluation("null", False)
    assert evaluation("int4 export.max_loss=0.1", False) == evaluation("int4", False)
    assert evaluation("as_released export.max_loss=0.1", False) == evaluation("as_released", False)
    assert evaluation("fp8", True) != evaluation("int4", True)
    run = load("tiny", ["export.quantization=int4", BF16])
    assert serving.rounding(run) is None and serving.is_apart(run)
    assert not serving.is_apart(load("tiny", ["export.quantization=int4", BF16, "evaluate.adapter=unmerged"]))


def test_what_vllm_cannot_compute_is_named_before_the_training():
    def lines(name: str, form: str, *overrides: str, cpu: bool = False) -> list[str]:
        keys = [f"export.quantization={form}", "evaluate.adapter=merged"]
        run = load(name, [*keys, "export.formats=[merged]", *overrides])
        return serving.unservable(run, known(name.partition("-1x")[0]), cpu)

    assert lines("glm45-air-1xh100", "int4") == []
    assert "on a CPU vLLM computes only int4, without experts" in lines("glm45-air-1xh100", "int4", cpu=True)[0]
    assert "needs bf16 (evaluate.precision)" in lines("glm45-air-1xh100", "fp8", "evaluate.precision=fp32")[0]


def test_releases_of_other_shapes_are_refused_by_their_config_json():
    configs = [json.loads((MODELS / f"{name}.json").read_text())["config"] for name in ("glm47", "gpt-oss-20b")]
    assert conversion.unwritable(configs[0], Export(quantization="int4")) == ""
    assert "one tensor of all experts" in conversion.unwritable(configs[1], Export(quantization="fp8"))


def test_a_gguf_file_is_refused_by_config_json_for_what_it_cannot_describe():
    def refusal(name: str, **changes: object) -> str:
        config = json.loads((MODELS / f"{name}.json").read_text())["config"]
        return conversion.unwritable(config | changes, Export(gguf="bf16"))

    assert [refusal(name) for name in ("llama31-8b", "qwen3-30b-a3b", "glm47")] == ["", "", ""]
    assert "files of GptOssForCausalLM were not compared" in refusal("gpt-oss-20b")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert "no rotary embedding of kind yarn" in refusal("qwen3-8b", rope_parameters=yarn)
