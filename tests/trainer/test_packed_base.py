"""Training on a packed base (model.base) is training on the weights that its codes and scales stand for."""

import json
from math import ceil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from conf.model_facts import facts_from_hf
from conf.planner.memory import holdings
from conf.rules.packed_base import FORMATS
from tests.support import mxfp4_release
from trainer.rehearsal import tiny_models
from trainer.weights.quantised import report

slow = pytest.mark.slow
STEPS = ["train.steps=6", "optimizer.lr=1e-3"]
PLACES = "paths.output={0} paths.logs={0}/logs paths.parity={0}/parity.json"
CUTS = {
    "alone": [],
    "tp2": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true"],
    "ep2": ["layout.gpus_per_node=2", "layout.ep=2"],
    "etp2": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "layout.etp=2"],
    "pp2": ["layout.gpus_per_node=2", "layout.pp=2"],
    "experts packed": ["layout.gpus_per_node=2", "layout.ep=2", "model.pack=[experts]"],
    "attention packed": ["layout.gpus_per_node=2", "layout.pp=2", "model.pack=[attention,dense]"],
    "tp2 ep2": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "layout.ep=2"],
    "recomputed": ["train.recompute=full"],
    "experts apart": ["moe.grouped_gemm=false"],
}
PACKS = {"experts packed": ["experts"], "attention packed": ["attention", "dense"]}
ROWS = [
    ("llama", "fp8", "alone", True),
    ("glm4-moe", "int4", "alone", True),
    ("glm4-moe", "fp8", "ep2", True),
    ("llama", "int4", "tp2", True),
    ("glm4-moe", "fp8", "etp2", True),
    ("glm4-moe", "int4", "etp2", True),
    ("glm4-moe-mtp", "int4", "pp2", True),
    ("deepseek-v3", "fp8", "tp2", True),
    ("glm4-moe", "int4", "recomputed", True),
    ("gpt2", "int4", "tp2", True),
    ("glm4-moe", "nvfp4", "alone", False),
    ("glm4-moe", "nvfp4", "ep2", True),
    ("glm4-moe", "nvfp4", "etp2", True),
    ("llama", "nvfp4", "tp2", True),
    ("glm4-moe-mtp", "nvfp4", "pp2", True),
    ("deepseek-v3", "nvfp4", "tp2", True),
    ("glm4-moe", "nvfp4", "experts apart", True),
    ("glm4-moe", "mxfp4", "etp2", True),
    ("llama", "mxfp4", "alone", True),
    ("glm4-moe-mtp", "nvfp4", "experts packed", True),
    ("glm4-moe-mtp", "int4", "attention packed", True),
    ("gpt-oss", "mxfp4", "tp2 ep2", True),
    ("gpt-oss", "mxfp4", "pp2", True),
    ("gpt-oss", "mxfp4", "recomputed", True),
    ("gpt-oss", "nvfp4", "ep2", True),
    ("gpt-oss", "fp8", "tp2", True),
    ("qwen3-next-mtp", "fp8", "tp2", False),
    ("qwen3-5-moe-mtp", "int4", "ep2", True),
    ("nemotron-h-mtp", "fp8", "ep2", True),
    ("gpt-oss", "int4", "alone", True),
]


@pytest.fixture(scope="module")
def train(configure, base, ranks, tmp_path_factory):
    """train(kind, *overrides, command="train", **request) -> losses, and the output's folder; the same is done once."""
    place, done = tmp_path_factory.mktemp("packed-base"), {}

    def train(kind: str, *overrides: str, command: str = "train", **request) -> tuple[list[float], Path]:
        asked = json.dumps([kind, overrides, command, request])
        if asked not in done:
            base(kind)
            folder = place / str(len(done))
            folder.mkdir()
            (folder / "request.json").write_text(json.dumps(request))
            run = configure(kind, *PLACES.format(folder).split(), *overrides)
            found = ranks(command, run)
            assert found.code == 0, found.output[-3000:]
            done[asked] = [line["lm_loss"] for line in found.metrics if line["kind"] == "train"], folder
        return done[asked]

    return train


@pytest.mark.parametrize(
    ("kind", "form", "cut"), [pytest.param(*row[:3], marks=slow if row[3] else ()) for row in ROWS]
)
def test_losses_are_those_on_the_weights_that_it_stands_for(kind, form, cut, train):
    same = CUTS[cut] if cut == "experts apart" else []  # which have adapters of their own, also in bf16
    pack = {"pack": PACKS[cut]} if cut in PACKS else {}
    expected, _ = train(kind, *STEPS, *same, command="train_unpacked", base=form, **pack)
    found, _ = train(kind, *STEPS, f"model.base={form}", *CUTS[cut])
    plain, _ = train(kind, *STEPS)
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(plain[0] - expected[0]) > 1e-5 * expected[0], "rounding has changed nothing, so nothing is compared"


@pytest.mark.slow
def test_a_resume_at_another_layout_goes_on_as_if_nothing_had_been(train, configure, ranks, tmp_path):
    """The checkpoint holds the adapter alone, so it is small; the base is packed anew, in other parts."""
    kind, shared = "glm4-moe", ["train.steps=4", "optimizer.lr=1e-3", "model.base=int4", "checkpoint.save_every=2"]
    whole, _ = train(kind, *shared)
    run = [kind, *PLACES.format(tmp_path).split(), *shared]
    assert ranks("train", configure(*run, "train.stop_after=2")).code == 0
    done = ranks("train", configure(*run, *CUTS["ep2"]))
    assert done.code == 0, done.output[-3000:]
    assert [line["lm_loss"] for line in done.metrics if line["kind"] == "train"] == pytest.approx(whole, rel=1e-5)
    keys = FileSystemReader(tmp_path / "checkpoints" / "iter_0000004").read_metadata().state_dict_metadata
    assert keys and not [key for key in keys if "layers." in key and ".adapter." not in key and "optimizer" not in key]


@pytest.mark.parametrize("mtp", [pytest.param("false", marks=slow), "true"])
def test_a_training_that_was_killed_goes_on_at_another_layout(mtp, configure, ranks, tmp_path):
    """With multi-token prediction and without it, from a base that was packed once, into other parts of it."""
    kind = "glm4-moe-mtp"
    shared = ["train.steps=6", "optimizer.lr=1e-3", "model.base=nvfp4", "checkpoint.save_every=2", f"model.mtp={mtp}"]
    paths = [f"paths.base={tmp_path / 'base'}", "convert.to=packed"]
    assert ranks("convert", configure(kind, *paths, *PLACES.format(tmp_path).split(), *shared)).code == 0
    whole = ranks("train", configure(kind, *paths, *PLACES.format(tmp_path / "whole").split(), *shared))
    paths += PLACES.format(tmp_path).split()
    assert ranks("train", configure(kind, *paths, *shared), kill_at=3).code == -9
    done = ranks("train", configure(kind, *paths, *shared, *CUTS["ep2" if mtp == "false" else "pp2"]))
    assert done.code == 0, done.output[-3000:]
    found, expected = ([line["lm_loss"] for line in one.metrics if line["kind"] == "train"] for one in (done, whole))
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-5)
    _, rows = reported(tmp_path)
    assert any("mtp" in row["tensor"] for row in rows) == (mtp == "true")


@slow
def test_a_base_that_holds_no_weights_is_packed_as_one_that_does(train, configure, ranks, tmp_path):
    cut = ["train.steps=2", "optimizer.lr=1e-3", "model.base=fp8", *CUTS["etp2"]]
    expected, _ = train("glm4-moe", *cut)
    paths = [f"paths.base={tmp_path}/base", *PLACES.format(tmp_path).split()]
    assert ranks("convert", configure("glm4-moe", *paths, "convert.to=none")).code == 0
    done = ranks("train", configure("glm4-moe", *paths, *cut))
    assert done.code == 0, done.output[-3000:]
    assert [line["lm_loss"] for line in done.metrics if line["kind"] == "train"] == expected


def reported(folder: Path) -> tuple[dict, list[dict]]:
    whole, *rows = map(json.loads, (folder / report.NAME).read_text().splitlines())
    return whole, rows


@pytest.mark.parametrize(
    ("form", "cut"),
    [
        ("nvfp4", "alone"),
        *(pytest.param(form, "ep2", marks=slow) for form in FORMATS),
        pytest.param("int4", "experts packed", marks=slow),
    ],
)
def test_the_report_has_every_matrix_and_as_many_bytes_as_are_planned(form, cut, train, configure):
    overrides = [*STEPS, f"model.base={form}", *CUTS[cut]]
    whole, rows = reported(train("glm4-moe", *overrides)[1])
    run = configure("glm4-moe", *overrides)
    (held,) = holdings(run, facts_from_hf(json.loads((Path(run.paths.model) / "config.json").read_text())), {})
    planned = ceil(held.quantized * FORMATS[form].bytes) + held.matrices * FORMATS[form].factor_bytes
    # small blocks: matrices end within them
    assert set(whole["bytes_of_ranks"]) == {planned} if form != "fp8" else min(whole["bytes_of_ranks"]) > planned
    assert whole["matrices"] == len(rows) == len({row["tensor"] for row in rows})
    assert whole["worst"] == rows[0]["tensor"] and rows[0]["error"] == max(row["error"] for row in rows)
    low, high = {"fp8": (0.02, 0.03), "mxfp4": (0.10, 0.14)}.get(form, (0.08, 0.12))
    assert low < whole["error"] < high and whole["as_released"] == 0
    assert sum(row["numbers"] for row in rows) == whole["numbers"]


def release(kind: str, form: str, folder: Path) -> None:
    """A release in the format of model.base: FP8 in blocks of 128, or groups of 32 with scales in bf16."""
    dtype = "bfloat16" if form == "nvfp4" else "float32"  # scales over a factor are those times another, rounded
    tiny_models.make_model(f"{kind}-{form}", folder, dtype=dtype, block=128 if form == "fp8" else 0)
    for file in folder.glob("*.safetensors") if form == "int4" else ():
        tensors = load_file(file)
        scales = {name: scale.bfloat16() for name, scale in tensors.items() if name.endswith("_scale")}
        save_file(tensors | scales, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("form", "to", "cut"),
    [
        ("fp8", "torch_dist", "etp2"),
        pytest.param("fp8", "none", "ep2", marks=slow),
        pytest.param("int4", "none", "etp2", marks=slow),
        pytest.param("int4", "torch_dist", "alone", marks=slow),
        pytest.param("nvfp4-modelopt", "none", "etp2", marks=slow),
        pytest.param("nvfp4-modelopt", "torch_dist", "ep2", marks=slow),
        pytest.param("nvfp4", "none", "ep2", marks=slow),
        pytest.param("nvfp4", "torch_dist", "etp2", marks=slow),
    ],
)
def test_a_release_in_the_same_format_is_taken_over(form, to, cut, configure, ranks, tmp_path):
    """Nothing is rounded, so the losses are those of the release without a packed base."""
    kind = "glm4-moe"
    release(kind, form, tmp_path / "model")
    losses = []
    # In bf16, which NVFP4 is unpacked to, another layout rounds otherwise.
    alike = ["train.precision=bf16", *CUTS[cut]] if form == "nvfp4" else []
    for more in (alike, [f"model.base={form.removesuffix('-modelopt')}", *(alike or CUTS[cut])]):
        folder = tmp_path / str(len(losses))
        paths = [f"paths.model={tmp_path / 'model'}", f"paths.base={tmp_path / 'base'}", *PLACES.format(folder).split()]
        run = configure(kind, *paths, f"convert.to={to}", "train.steps=4", "optimizer.lr=1e-3", *more)
        folder.mkdir()
        if not losses:
            assert ranks("convert", run).code == 0
        done = ranks("train", run)
        assert done.code == 0, done.output[-3000:]
        losses.append([line["lm_loss"] for line in done.metrics if line["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    whole, rows = reported(tmp_path / "1")
    assert whole["error"] <= (2**-9 if alike else 0)  # a code times two scales has more digits than bf16
    assert whole["as_released"] == whole["matrices"] == len(rows)
    assert f"{whole['as_released']} as released" in done.output


@pytest.mark.parametrize(
    ("to", "cut"),
    [
        ("none", "tp2 ep2"),
        *(
            pytest.param(*row, marks=slow)
            for row in [("packed", "experts packed"), ("torch_dist", "alone"), ("torch_dist", "pp2"), ("packed", "ep2")]
        ),
    ],
)
def test_experts_of_gpt_oss_are_taken_over_from_its_release(to, cut, configure, ranks, tmp_path):
    """In MXFP4, of all experts of a layer in one tensor, transposed, gate and up by turns, with biases beside them.

    Of experts alone nothing is rounded: then training is that of the release.
    """
    mxfp4_release.make(tmp_path / "model")
    alone = cut == "experts packed"
    losses = []
    for command, way, more in (
        ("train" if alone else "train_unpacked", "none", CUTS[cut][:-1] if alone else []),
        ("train", to, ["model.base=mxfp4", *CUTS[cut]]),
    ):
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps({"base": "mxfp4"}))
        paths = [f"paths.model={tmp_path / 'model'}", f"paths.base={folder / 'base'}", *PLACES.format(folder).split()]
        run = configure("gpt-oss", *paths, *STEPS, f"convert.to={way}", *more)
        assert ranks("convert", run).code == 0
        done = ranks(command, run)
        assert done.code == 0, done.output[-3000:]
        losses.append([line["lm_loss"] for line in done.metrics if line["kind"] == "train"])
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    _, rows = reported(tmp_path / "1")
    experts = [row for row in rows if ".experts." in row["tensor"]]
    assert experts and all(row["as_released"] and row["error"] == 0 for row in experts)
    assert not any(row["as_released"] for row in rows if row not in experts) and (rows == experts) == alone


@slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [("deepseek-v3", "fp8"), ("kimi-k2", "int4"), ("glm4-moe-mtp", "fp8"), ("qwen3-5-moe-mtp", "fp8")],
)
def test_what_a_release_has_unquantised_is_packed_beside_what_is_taken_over(kind, form, configure, ranks, tmp_path):
    """The tiny ones leave kv_a_proj_with_mqa, eh_proj, and in_proj_a and _b of gated delta nets as they are."""
    release(kind, form, tmp_path / "model")
    paths = [f"paths.{name}={tmp_path / name}" for name in ("model", "base")]
    cut = [] if "mtp" in kind else CUTS["tp2"]
    run = configure(kind, *paths, *PLACES.format(tmp_path).split(), "train.steps=1", f"model.base={form}", *cut)
    assert ranks("convert", run).code == 0 and ranks("train", run).code == 0
    _, rows = reported(tmp_path)
    anew = [row for row in rows if row["error"]]
    assert anew == [row for row in rows if not row["as_released"]]
    left = ("linear_kv_down_proj.weight", "eh_proj.weight", "in_proj.weight.alpha", "in_proj.weight.beta")
    assert 0 < len(anew) < 8 < len(rows)
    assert all(row["tensor"].endswith(left) for row in anew)


@slow
def test_a_release_in_other_blocks_is_packed_anew(configure, ranks, tmp_path):
    tiny_models.make_model("llama-fp8", tmp_path / "model")
    paths = [f"paths.{name}={tmp_path / name}" for name in ("model", "base")]
    run = configure("llama", *paths, *PLACES.format(tmp_path).split(), "train.steps=1", "model.base=fp8")
    assert ranks("convert", run).code == 0 and ranks("train", run).code == 0
    assert reported(tmp_path)[0]["as_released"] == 0
