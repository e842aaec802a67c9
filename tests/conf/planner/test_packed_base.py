"""Plans of a base that lies packed: its bytes, what is unpacked at once, and the time that unpacking takes."""

from dataclasses import replace
from math import ceil

import pytest

from conf.load import load
from conf.planner import advice, display, hardware, verdict
from conf.planner.hardware import GPUS
from conf.planner.memory import holdings, memory
from conf.planner.rates import preparing
from conf.planner.search import search
from conf.planner.serving.duration import READ
from conf.planner.stage_needs import converted, loadings, packing_cost
from conf.planner.timing import timing
from conf.planner.work import products
from conf.rules import packed_base
from conf.rules.packed_base import FORMATS
from tests.support.known_models import known

FACTS, GPU = known("glm47"), GPUS["h200"]


def plan(base: str):
    return load("glm47", [f"model.base={base}"])


@pytest.mark.parametrize("base", FORMATS)
def test_weights_are_codes_and_scales_but_for_what_stays(base):
    """Embeddings, norms and routers stay: a hundredth of GLM-4.7."""
    run = plan(base)
    for stage, plain, held in zip(
        memory(run, FACTS, GPU), memory(plan("bf16"), FACTS, GPU), holdings(run, FACTS, {}), strict=True
    ):
        stays = held.parameters - held.quantized
        factors = FORMATS[base].factor_bytes * held.matrices
        assert stage.weights == 2 * stays + ceil(held.quantized * FORMATS[base].bytes) + factors
        assert factors < 1e-5 * stage.weights
        assert plain.weights == 2 * held.parameters and stage.copies == 0
        assert stage.optimizer == plain.optimizer and stage.adapters == plain.adapters


@pytest.mark.parametrize("pack", ["[experts]", "[attention,dense]"])
def test_what_is_not_packed_takes_its_bytes_and_no_time(pack):
    run = load("glm47", ["model.base=nvfp4", f"model.pack={pack}"])
    whole, form = plan("nvfp4"), FORMATS["nvfp4"]
    for of_pack, of_all in zip(holdings(run, FACTS, {}), holdings(whole, FACTS, {}), strict=True):
        assert 0 < of_pack.quantized < of_all.quantized and 0 < of_pack.matrices < of_all.matrices
    for stage, held in zip(memory(run, FACTS, GPU), holdings(run, FACTS, {}), strict=True):
        stays = held.parameters - held.quantized
        assert stage.weights == 2 * stays + ceil(held.quantized * form.bytes) + form.factor_bytes * held.matrices
    took = {one.part: preparing(run, GPU, one)[0] > 0 for one in products(run, FACTS, "moe")}
    assert took["experts"] == ("experts" in pack) and took["attention"] == took["shared experts"] == ("dense" in pack)


def test_the_two_choices_of_what_is_packed_are_all_of_it():
    every = [load("glm47", ["model.base=int4", f"model.pack={pack}"]) for pack in ("[experts]", "[attention,dense]")]
    pairs = zip(*(holdings(run, FACTS, {}) for run in every), holdings(plan("int4"), FACTS, {}), strict=True)
    for one, other, both in pairs:
        assert one.quantized + other.quantized == both.quantized and one.matrices + other.matrices == both.matrices


def test_the_largest_matrices_of_a_layer_are_unpacked_besides():
    run = plan("int4")
    stages = [memory(one, FACTS, GPU)[:-1] for one in (run, plan("bf16"))]  # the last is fullest at the loss
    pairs = zip(*stages, strict=True)
    local = FACTS.experts // run.layout.ep
    assert {one.working - other.working for one, other in pairs} == {
        2 * local * FACTS.hidden * 2 * FACTS.expert_ffn // run.layout.etp
    }


def test_each_pass_over_a_layer_unpacks_it():
    run, plain = plan("fp8"), plan("bf16")
    found = {one.part: preparing(run, GPU, one) for one in products(run, FACTS, "moe")}
    assert found["router"] == found["adapters"] == (0.0, 0.0)
    assert found["experts"][0] == found["experts"][1] > found["attention"][0] > 0
    assert preparing(plain, GPU, products(plain, FACTS, "moe")[0]) == (0.0, 0.0)
    assert 1 < timing(run, FACTS, GPU).likely / timing(plain, FACTS, GPU).likely < 1.3


@pytest.mark.parametrize("base", ["int4", "nvfp4", "mxfp4"])
def test_4_bits_take_little_more_than_a_quarter_of_bf16(base):
    assert 0.26 < FORMATS[base].bytes / 2 < 0.29


def test_each_matrix_has_a_factor_and_gate_and_up_have_their_own():
    """GLM-4.7: qkv, proj, and dense or shared gate, up and down; three for each expert; one more with MTP."""
    run = plan("nvfp4")
    count = sum(held.matrices for held in holdings(run, FACTS, {}))
    local = FACTS.experts // run.layout.ep
    moe = FACTS.layers - FACTS.kinds.count("dense") + FACTS.mtp_layers
    assert count == 5 * (FACTS.layers + FACTS.mtp_layers) + 3 * local * moe + FACTS.mtp_layers


def test_fewer_gpus_hold_it():
    assert not search(plan("bf16"), FACTS, GPU, 4).fitting
    assert search(plan("fp8"), FACTS, GPU, 4).roomy
    assert search(plan("int4"), FACTS, GPU, 2).roomy
    assert search(plan("nvfp4"), FACTS, GPU, 2).roomy


def test_a_run_that_fits_nowhere_is_told_a_format_with_which_it_does():
    """In bf16 GLM-4.7 does not fit on four H200, and in FP8 not on two; what does is said with the keys of a layout."""
    merged, stages = "evaluate.adapter=merged", "layout.pp=2 layout.vpp=2 layout.ep=1"
    for name, base, instead, layout, keys in (
        ("glm47-4xh200", "bf16", "fp8", "train.micro_batch=2", []),
        ("glm47-2xh200", "fp8", "nvfp4", f"{stages} train.micro_batch=2", [merged]),
        ("glm47-2xh200", "fp8", "nvfp4", f"{stages} train.micro_batch=2", []),  # vLLM serves the codes
    ):
        run = load(name, [f"model.base={base}", *keys])
        planned = verdict.plan(run, FACTS, hardware.of(run))
        line = advice.refusal(planned)
        assert f" fits; with model.base={instead} does: {layout}, or layout." in line and "\n" not in line
        assert f"with model.base={instead}:" in [*display.lines(planned)]
    run = load("glm47-2xh200", ["model.base=mxfp4", "data.seq_length=131072", "data.packed=false", merged])
    assert verdict.plan(run, FACTS, hardware.of(run)).instead.keys() == {""}


def test_a_base_that_is_packed_once_takes_its_codes_on_disk_and_is_read_as_fast_as_the_disk():
    plain = plan("fp8")
    packed = plain.model_copy(update={"convert": plain.convert.model_copy(update={"to": "packed"})})
    ways = {way.to: way for way in loadings(plain, FACTS)}
    assert [*ways] == ["torch_dist", "none", "packed"]
    assert [way.to for way in loadings(plan("bf16"), FACTS)] == ["torch_dist", "none"]
    assert ways["packed"].disk == converted(packed, FACTS) == pytest.approx(0.505 * ways["torch_dist"].disk, rel=0.01)
    assert ways["packed"].start == ways["packed"].disk / READ < ways["torch_dist"].start < ways["none"].start
    assert ways["packed"].once > ways["none"].once


def test_the_cost_of_packing_reads_the_unpacked_base_once_per_micro_batch():
    run = plan("fp8")
    assert packing_cost(plan("bf16"), FACTS) == packing_cost(run.changed(log={"packing_cost": False}), FACTS) == 0
    short = run.changed(data={"seq_length": 1024}, train={"micro_batch": 1})
    for one in (run, short):
        torch_dist = one.changed(convert={"to": "torch_dist"})
        (read,) = (way.start for way in loadings(one, FACTS) if way.to == "torch_dist")
        assert packing_cost(torch_dist, FACTS) == pytest.approx(read * packed_base.measured_batches(one))
    quantised = replace(FACTS, packed=1.0)
    assert packing_cost(run.changed(convert={"to": "none"}), quantised) == 0
    assert packing_cost(run.changed(convert={"to": "packed"}, log={"packing_cost": True}), quantised) > 0
