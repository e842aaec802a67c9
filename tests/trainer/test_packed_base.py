"""Training on a packed base (model.base) is training on the weights that its codes and scales stand for."""

import json
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

slow = pytest.mark.slow
STEPS = ["train.steps=20", "optimizer.lr=1e-3"]
PLACES = "paths.output={0} paths.logs={0}/logs paths.parity={0}/parity.json"
CUTS = {
    "alone": [],
    "tp2": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true"],
    "ep2": ["layout.gpus_per_node=2", "layout.ep=2"],
    "etp2": ["layout.gpus_per_node=2", "layout.tp=2", "layout.sp=true", "layout.etp=2"],
    "pp2": ["layout.gpus_per_node=2", "layout.pp=2"],
    "recomputed": ["train.recompute=full"],
    "experts apart": ["moe.grouped_gemm=false"],
}
ROWS = [
    ("llama", "fp8", "alone", False),
    ("glm4-moe", "int4", "alone", False),
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
    expected, _ = train(kind, *STEPS, *same, command="train_unpacked", base=form)
    found, _ = train(kind, *STEPS, f"model.base={form}", *CUTS[cut])
    plain, _ = train(kind, *STEPS)
    assert len(found) == 20
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(plain[0] - expected[0]) > 1e-5 * expected[0], "rounding has changed nothing, so nothing is compared"


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


@slow
def test_a_base_that_holds_no_weights_is_packed_as_one_that_does(train, configure, ranks, tmp_path):
    cut = ["train.steps=2", "optimizer.lr=1e-3", "model.base=fp8", *CUTS["etp2"]]
    expected, _ = train("glm4-moe", *cut)
    paths = [f"paths.base={tmp_path}/base", *PLACES.format(tmp_path).split()]
    assert ranks("convert", configure("glm4-moe", *paths, "convert.to=none")).code == 0
    done = ranks("train", configure("glm4-moe", *paths, *cut))
    assert done.code == 0, done.output[-3000:]
    assert [line["lm_loss"] for line in done.metrics if line["kind"] == "train"] == expected
