"""conf/rules/precision.py: what goes together, what a width or a GPU rules out, and that a line says what would be
right."""

import pytest

from conf.load import load
from conf.planner.hardware import CPU, GPUS, unsupported
from conf.planner.rates import fp8
from conf.rules.layout import problems
from conf.rules.precision import beyond_a_cpu, widths
from contract.faults import ConfigError
from tests.support.known_models import known

FULL = "adapter.kind=none"


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            ["train.fp8=current", "train.precision=fp32"],
            "train.fp8: current needs train.precision bf16, but it is fp32",
        ),
        (["train.fp8_weights=true"], "computes no products in FP8; current does"),
        (["train.fp8_weights=true", "train.fp8=current", FULL], "training would start from rounded weights; false"),
        (["train.fp8_weights=true", "train.fp8=mxfp8"], "mxfp8 keeps two copies, more than bf16"),
        (
            ["train.fp8=delayed", "train.recompute=selective", "train.recompute_modules=[layernorm]"],
            "train.recompute_modules: layernorm is not recomputed under train.fp8 delayed; current allows it",
        ),
        (["optimizer.states=bf16", "train.precision=fp32"], "bf16 needs train.precision bf16; with fp32 it is fp32"),
        (["optimizer.offload=0.5", "train.precision=fp32"], "0.5 needs train.precision bf16; with fp32 it is 0.0"),
        (["optimizer.offload=0.5", "optimizer.distributed=false"], "0.5 needs optimizer.distributed true"),
        (["optimizer.states=fp8", "optimizer.offload=0.5"], "fp8, but with optimizer.offload all states are fp32"),
        (["optimizer.states=fp8", "train.fp8=blockwise"], "fp8 cannot be resumed with train.fp8 blockwise; bf16 can"),
        (["optimizer.offload=1.01"], "optimizer.offload: 1.01 is too large: it must be at most 1"),
    ],
)
def test_contradictions_are_one_line(changes, says):
    with pytest.raises(ConfigError) as error:
        load("glm47", changes)
    assert says in str(error.value) and len(str(error.value).splitlines()) == 1


def test_widths_that_no_product_in_fp8_takes():
    """1536 over etp 64 leaves 24, and 1024 tokens over 256 ranks of cp leave 4."""
    run = load("glm47", ["train.fp8=current"])
    assert not list(widths(run, known("glm47")))
    cut = run.model_copy(update={"layout": run.layout.model_copy(update={"etp": 64, "nodes": 8, "ep": 1})})
    assert [(key, size) for key, _, size, _ in widths(cut, known("glm47"))] == [("layout.etp", 24)]
    short = load("glm47", ["train.fp8=mxfp8", "data.seq_length=8160"])
    found = [line for line in problems(short, known("glm47")) if "train.fp8" in line]
    assert found == [
        "data.seq_length: tokens of a rank's microbatch: 4080 is no multiple of 32, which train.fp8 mxfp8 needs; "
        "nearest legal: 8128, 8192"
    ]


@pytest.mark.parametrize(
    "recipe, gpu, says",
    [
        ("current", "a100", ["train.fp8: current, but a100 has no FP8; null"]),
        ("mxfp8", "h200", ["train.fp8: mxfp8 is not supported by h200; it supports current, delayed, blockwise"]),
        ("mxfp8", "gb200", []),
        ("blockwise", "h100", []),
    ],
)
def test_gpus(recipe, gpu, says):
    assert unsupported(load("glm47", [f"train.fp8={recipe}"]), GPUS[gpu]) == says


def test_a_cpu_computes_in_full_and_offloads():
    run = load("glm47", ["train.fp8=current", "optimizer.states=bf16"])
    assert [key for key, _, _ in beyond_a_cpu(run)] == ["train.fp8", "optimizer.states"] and len(
        unsupported(run, CPU)
    ) == 2
    assert not beyond_a_cpu(load("glm47", ["optimizer.offload=1.0"]))


def test_routers_logits_and_adapters_stay_in_bf16():
    run = load("glm47", ["train.fp8=blockwise"])
    parts = ("router", "logits", "adapters", "attention", "experts")
    assert [fp8(run.train, part) for part in parts] == [None, None, None, "blockwise", "blockwise"]
