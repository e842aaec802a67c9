"""The cost of packing is a difference of two losses, and wrong codes give a warning."""

import json
import random

import pytest
from safetensors.torch import load_file, save_file

from trainer.rehearsal import tiny_models

slow = pytest.mark.slow
TWO = "layout.gpus_per_node=2"
SHARED = ["train.steps=1", "optimizer.lr=1e-12", "train.validate_every=1"]
SHARED += ["train.global_batch=2", "train.validate_batches=8"]  # all 16 rows for validation
CUTS = {
    "alone": [],
    "tp2": [TWO, "layout.tp=2", "layout.sp=true"],
    "ep2": [TWO, "layout.ep=2", "train.micro_batch=1"],
    "pp2": [TWO, "layout.pp=2"],
    "cp2": [TWO, "layout.cp=2"],
    "packed rows": ["data.packed=true"],
}


@pytest.fixture
def cost(configure, base, ranks, tmp_path):
    """cost(kind, *overrides, command="train", to="output") -> lines of metrics, and the output."""

    def cost(kind: str, *overrides: str, command: str = "train", to: str = "output"):
        rows = [json.dumps({"input": str(i), "output": digits(i)}) + "\n" for i in range(32)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data/training.jsonl").write_text("".join(rows[:16]))
        (tmp_path / "data/validation.jsonl").write_text("".join(rows[16:]))
        places = {"data": "data", "output": to, "logs": "logs", "parity": f"{to}.json"}
        paths = [f"paths.{name}={tmp_path}/{place}" for name, place in places.items()]
        found = ranks(command, configure(kind, *paths, *SHARED, *overrides))
        assert found.code == 0, found.output[-3000:]
        return found

    return cost


def digits(seed: int) -> str:
    return "".join(random.Random(seed).choices("0123456789", k=40))


def line(found, kind: str = "packing") -> dict:
    (of_kind,) = [one for one in found.metrics if one["kind"] == kind]
    return of_kind


@pytest.mark.parametrize(
    ("kind", "form", "cut"),
    [
        ("glm4-moe", "int4", "tp2"),
        pytest.param("glm4-moe", "int4", "ep2", marks=slow),
        pytest.param("glm4-moe-mtp", "nvfp4", "pp2", marks=slow),
        pytest.param("gpt-oss", "mxfp4", "tp2", marks=slow),
        pytest.param("llama", "fp8", "cp2", marks=slow),
        pytest.param("llama", "int4", "packed rows", marks=slow),
        pytest.param("deepseek-v3", "int4", "tp2", marks=slow),
    ],
)
def test_the_unpacked_loss_is_that_of_a_base_in_full_precision(kind, form, cut, cost, base, tmp_path):
    """With a learning rate of almost 0, a validation gives the loss of the base."""
    base(kind)
    plain = line(cost(kind, *(CUTS[cut] if cut == "packed rows" else []), to="plain"), "validation")
    found = cost(kind, f"model.base={form}", *CUTS[cut])
    packed, measured = line(found, "validation"), line(found)
    assert measured["rows"] == "validation"
    assert measured["unpacked_loss"] == pytest.approx(plain["lm_loss"], rel=1e-6)
    assert measured["packed_loss"] == pytest.approx(packed["lm_loss"], rel=1e-6)
    assert measured["cost"] == measured["packed_loss"] - measured["unpacked_loss"]
    assert 0 < measured["cost_error"] < measured["distance"] and measured["share"] < 0.5
    assert "packing costs" in found.output and "warning: model.base" not in found.output


def test_scales_of_another_tensor_are_warned_of(cost, configure, ranks, tmp_path):
    """The last layer's are much larger than the first's, which the planted fault gives it."""
    tiny_models.make_model("llama", tmp_path / "model", dtype="float32")
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors.keys() & {"model.layers.3.mlp.down_proj.weight"}:
            tensors[name] *= 16
        save_file(tensors, file, {"format": "pt"})
    paths = [f"paths.{name}={tmp_path / name}" for name in ("model", "base")]
    assert ranks("convert", configure("llama", *paths)).code == 0
    usual = cost("llama", *paths, "model.base=int4")
    faulty = cost("llama", *paths, "model.base=int4", command="train_other_scales", to="other")
    assert "warning: model.base" not in usual.output
    assert "codes or scales may be of other weights" in faulty.output
    assert line(faulty)["unpacked_loss"] == line(usual)["unpacked_loss"]
    assert line(faulty)["share"] > 4 * line(usual)["share"]


@slow
@pytest.mark.parametrize("way", ["none", "packed"])
def test_a_base_without_weights_is_compared_with_its_release(way, cost, configure, ranks, base, tmp_path):
    base("glm4-moe")
    expected = line(cost("glm4-moe", "model.base=int4"))
    more = [f"paths.base={tmp_path / 'base'}", f"convert.to={way}", "model.base=int4"]
    assert ranks("convert", configure("glm4-moe", *more)).code == 0
    measured = line(cost("glm4-moe", *more, *CUTS["tp2"], to="other"))
    figures = expected.keys() - {"kind", "rows", "time", "seconds"}
    assert {key: measured[key] for key in figures} == pytest.approx({key: expected[key] for key in figures}, rel=1e-4)


def test_without_the_unpacked_base_only_the_packed_loss_is_measured(cost, base):
    base("llama")
    found = cost("llama", "model.base=int4", "log.packing_cost=false")
    assert line(found).keys() == {"kind", "step", "time", "rows", "packed_loss", "tokens", "seconds"}
