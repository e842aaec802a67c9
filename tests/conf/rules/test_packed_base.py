"""conf/rules/packed_base.py: what a packed base goes together with, and how many bytes its numbers take."""

from dataclasses import replace

import pytest

from conf.load import load
from conf.rules.layout import problems
from conf.rules.packed_base import FORMATS, is_packed, widths
from conf.schema import identity
from contract.faults import ConfigError
from tasks.run.artifact import Stage
from tasks.stages import convert
from tests.support.known_models import known


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("glm47", ["adapter.kind=none"], "adapter.kind is none: trained weights cannot be packed; bf16"),
        ("glm47", ["adapter.kind=dora"], "dora needs norms of the weights; bf16, or adapter.kind lora"),
        ("glm47", ["train.fp8=current"], "train.fp8 current keeps other copies of the weights; bf16, or null"),
        ("tiny", ["train.objective=dpo"], "train.objective dpo compares with the unpacked base; bf16"),
        ("tiny-rl", [], "reinforce.steps 20 samples from unpacked weights; bf16"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_one_line(name, changes, says):
    with pytest.raises(ConfigError) as error:
        load(name, ["model.base=int4", *changes])
    found = [line for line in str(error.value).splitlines() if "model.base: int4" in line]
    assert sum(says in line for line in found) == 1


@pytest.mark.parametrize(
    "changes, says",
    [
        (["model.base=bf16"], "packed, but model.base bf16 is not packed; released"),
        (["export.formats=[adapter]"], "packed, but export.formats lacks merged; released"),
        (["export.quantization=as_released"], "packed, but export.quantization as_released merges onto the release"),
        (
            ["export.checkpoint=base", "export.formats=[merged]"],
            "packed, but export.checkpoint is base, which has no ad",
        ),
        (["evaluate.adapter=unmerged"], "packed, but evaluate.adapter unmerged serves no merged model; released"),
    ],
)
def test_what_is_not_merged_onto_packed_weights_is_refused_in_one_line(changes, says):
    with pytest.raises(ConfigError) as error:
        base = [] if "model.base=bf16" in changes else ["model.base=int4"]
        load("glm47", [*base, "export.merge_onto=packed", *changes])
    (found,) = [line for line in str(error.value).splitlines() if "export.merge_onto: " in line]
    assert says in found
    assert load("glm47", ["model.base=int4", "export.merge_onto=packed"])


def test_what_is_packed_is_a_choice_where_anything_is():
    with pytest.raises(ConfigError, match=r"model\.pack: has no effect with model\.base bf16"):
        load("glm47", ["model.pack=[experts]"])
    with pytest.raises(ConfigError, match=r"model\.pack: "):
        load("glm47", ["model.base=int4", "model.pack=[]"])
    run = load("glm47", ["model.base=int4", "model.pack=[experts,dense]"])
    layer = "module.decoder.layers.4"
    found = {name: is_packed(run, f"{layer}.{name}") for name in ("self_attention.linear_qkv", "mlp.linear_fc1")}
    assert found == {"self_attention.linear_qkv": False, "mlp.linear_fc1": True}
    assert is_packed(run, f"{layer}.mlp.experts.linear_fc1") and is_packed(
        run, f"{layer}.mlp.shared_experts.linear_fc1"
    )
    alone = load("glm47", ["model.base=int4", "model.pack=[attention]"])
    assert not is_packed(alone, f"{layer}.mlp.experts.local_experts.3.linear_fc1")
    assert identity.of(load("glm47", ["model.base=int4"]), "train")["model"].keys() == {"base", "mtp", "mtp_loss_scale"}
    cut = run.model_copy(update={"layout": run.layout.model_copy(update={"tp": 64, "ep": 1})})
    assert not [what for _, what, _, _ in widths(cut, known("glm45-air")) if "attention" in what]


@pytest.mark.parametrize(
    "pack, says",
    [
        ("[]", "a list is too short: it must have at least 1"),
        ("[expert]", "\"expert\" is not one of 'experts', 'attention' or 'dense'"),
        ("experts", '"experts" is not a list'),
    ],
)
def test_what_is_no_choice_of_parts_is_refused_in_one_line(pack, says):
    with pytest.raises(ConfigError) as error:
        load("glm47", ["model.base=int4", f"model.pack={pack}"])
    (line,) = str(error.value).splitlines()
    assert line.endswith(f"model.pack: {says}")


def test_parts_that_the_model_has_not_are_refused():
    """A dense model whose experts are to be packed would lie in bf16 as a whole."""
    chosen = ["model.base=int4", "model.pack=[experts,attention]"]
    run = load("llama31-8b-1xh100", chosen)
    (line,) = problems(run, known("llama31-8b"))
    assert line == "model.pack: experts, but the model has none of them; leave it out, or null"
    assert not problems(load("glm47", chosen), known("glm47"))
    assert not problems(load("llama31-8b-1xh100", ["model.base=int4", "model.pack=[dense]"]), known("llama31-8b"))


def test_what_is_packed_once_has_a_format_and_no_teacher():
    with pytest.raises(
        ConfigError, match=r"convert\.to: packed, but model\.base is bf16; torch_dist, or model\.base fp8"
    ):
        load("glm47", ["convert.to=packed"])
    taught = ["train.objective=distill", "train.teacher=org/teacher", "convert.to=packed", "model.base=fp8"]
    with pytest.raises(
        ConfigError, match=r"convert\.to: packed, but train\.objective distill reads its teacher's base"
    ):
        load("tiny", taught)


def test_an_unknown_format_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"model\.base: .*bf16.*fp8.*int4.*nvfp4.*mxfp4"):
        load("glm47", ["model.base=nf4"])


@pytest.mark.parametrize("base", ["int4", "nvfp4", "mxfp4"])
def test_widths_that_4_bits_cannot_hold(base):
    """Air's experts have a width of 1408: over etp 64 that is 22."""
    run = load("glm45-air-16xh100", [f"model.base={base}"])
    cut = run.model_copy(update={"layout": run.layout.model_copy(update={"etp": 64, "nodes": 8, "ep": 1})})
    assert [(key, size) for key, _, size, _ in widths(cut, known("glm45-air"))] == [("layout.etp", 22)]
    (line,) = [line for line in problems(cut, known("glm45-air")) if "model.base" in line]
    assert f"experts' width over etp: 22 is no multiple of 8, which model.base {base} needs" in line
    assert not list(widths(load("glm45-air-16xh100", ["model.base=fp8"]), known("glm45-air")))


def test_widths_that_no_layout_mends_are_refused_with_formats_that_do():
    """Ranks of tp cut no inputs of these matrices: hidden size, and the ranks of latent attention's products."""
    run, facts = load("deepseek-v3-8xh200", ["model.base=nvfp4"]), known("deepseek-v3")
    assert not list(widths(run, facts))
    odd = replace(facts, hidden=7172, q_rank=1500, kv_rank=516)
    lines = [line for line in problems(run, odd) if "model.base nvfp4 needs" in line]
    assert len(lines) == 3 and all(line.startswith("model.base: ") for line in lines)
    assert "hidden size: 7172 is no multiple of 8, which model.base nvfp4 needs; nearest legal: fp8" in lines[0]
    experts = run.model_copy(update={"model": run.model.model_copy(update={"pack": ("experts",)})})
    assert [size for _, _, size, _ in widths(experts, odd)] == [7172]
    assert not list(widths(load("deepseek-v3-8xh200"), odd))


def test_bytes_of_a_number():
    assert FORMATS["fp8"].bytes == 1 + 4 / 128**2
    assert FORMATS["int4"].bytes == FORMATS["nvfp4"].bytes == 0.5 + 2 / 32
    assert FORMATS["mxfp4"].bytes == 0.5 + 1 / 32


def test_another_format_is_another_training_and_the_usual_one_is_none():
    plain, packed = load("glm47"), load("glm47", ["model.base=fp8"])
    assert "base" not in identity.of(plain, "train")["model"]
    assert identity.of(packed, "train")["model"]["base"] == "fp8"
    assert identity.of(packed, "convert") == identity.of(plain, "convert")


def test_each_format_that_is_packed_once_is_an_artifact_of_its_own_and_others_are_as_they_were():
    made = Stage("download", 1, {}, {})
    plain = convert.stage(load("glm47"), made)
    assert convert.stage(load("glm47", ["model.base=fp8"]), made) == plain
    packed = {base: convert.stage(load("glm47", ["convert.to=packed", f"model.base={base}"]), made) for base in FORMATS}
    assert len({one.fingerprint for one in (plain, *packed.values())}) == 1 + len(FORMATS)
    assert packed["fp8"].config == plain.config | {"to": "packed", "base": "fp8"}
