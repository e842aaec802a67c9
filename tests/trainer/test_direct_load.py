"""Training that reads the release itself has the same losses, to the last bit, as from a converted base."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import layouts
from trainer.rehearsal import tiny_models

slow = pytest.mark.slow
OFTEN = ("glm4-moe", "tp=2 sp=true ep=2")
CASES = dict.fromkeys((case.model, case.cut) for case in layouts.TABLE)


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    """A folder that stays as long as the session: what was prepared for one run is copied for others."""
    return tmp_path_factory.mktemp("direct")


@pytest.fixture
def both(configure, ranks, folder):
    """both(kind, *overrides) -> losses of a training from a converted base, and of one from the release.

    What either has in memory at its end is the same, by the digests that an export holds against what it reads.
    """

    def both(kind: str, *overrides: str) -> list[list[float]]:
        losses, in_memory = [], []
        for to in ("torch_dist", "none"):
            paths = [f"paths.{name}={folder / to / name}" for name in ("base", "output", "logs")]
            given = [*paths, f"convert.to={to}", "train.steps=2", "checkpoint.save_every=1"]
            model = [one for one in overrides if one.startswith(("model.", "train.precision", "paths.model"))]
            converted = ranks("convert", configure(kind, *given, *model))
            assert converted.code == 0, converted.output
            trained = ranks("train", configure(kind, *given, *overrides))
            assert trained.code == 0, trained.output
            losses.append([line["lm_loss"] for line in trained.metrics if line["kind"] == "train"])
            file = folder / to / "output/checkpoints/iter_0000002/tensors.json"
            in_memory.append(json.loads(file.read_text())["digests"])
        assert in_memory[0] == in_memory[1]
        assert all(len(found) == 2 for found in losses)
        return losses

    return both


def cut(model: str, layout: str, folder: Path) -> list[str]:
    """The overrides of a layout of benchmarks/layouts.py."""
    run = layouts.configured(layouts.Case(model, layout), folder, 1)
    degrees = {key: value for key, value in run.layout.model_dump().items() if value not in (None, False)}
    found = [f"layout.{key}={str(value).lower()}" for key, value in degrees.items()]
    return [*found, "train.micro_batch=1", f"adapter.targets=[{','.join(run.adapter.names)}]"]


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*one, marks=() if one == OFTEN else slow) for one in CASES if one[1]]
)
def test_losses_are_those_of_a_converted_base_to_the_last_bit(kind, layout, both, folder):
    converted, direct = both(kind, *cut(kind, layout, folder))
    assert converted == direct
    assert sum(file.stat().st_size for file in (folder / "none/base").rglob("*.distcp")) < 2**20


@slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("glm4-moe", ("adapter.kind=none",)),
        ("glm4-moe", ("adapter.kind=none", "layout.ep=2", "layout.gpus_per_node=2", "optimizer.distributed=true")),
        ("glm4-moe-mtp", ("model.mtp=false",)),
        ("llama", ("adapter.kind=dora", "layout.tp=2", "layout.gpus_per_node=2")),
        ("qwen3-moe", ("train.precision=bf16",)),
        ("glm4-moe", ("moe.grouped_gemm=false", "layout.ep=2", "layout.gpus_per_node=2")),
    ],
)
def test_so_they_are_of_every_weight_and_every_adapter(kind, more, both):
    converted, direct = both(kind, *more)
    assert converted == direct


@slow
@pytest.mark.parametrize("kind", ["glm4-moe-fp8", "deepseek-v3-fp8-rows", "qwen3-moe-int4"])
@pytest.mark.parametrize("layout", ["", "tp=2 sp=true ep=2"])
def test_so_they_are_of_a_quantised_release(kind, layout, both, tmp_path):
    family = kind.removesuffix("-fp8-rows").removesuffix("-fp8").removesuffix("-int4")
    tiny_models.make_model(kind, tmp_path / "model")
    degrees = cut(family, layout, tmp_path) if layout else ["adapter.targets=all-linear"]
    converted, direct = both(family, f"paths.model={tmp_path / 'model'}", "train.precision=bf16", *degrees)
    assert converted == direct


@pytest.fixture
def direct(configure, ranks, folder):
    """direct(*overrides, command="train") -> result, with a model of the test's own that is read without a base."""
    shutil.copytree(configure("llama").paths.model, folder / "model")
    paths = [f"paths.{name}={folder / name}" for name in ("model", "base", "output", "logs")]

    def direct(*overrides: str, command: str = "train", kill_at: int | None = None):
        mine = {override.split("=")[0] for override in overrides}
        given = [one for one in (*paths, "convert.to=none") if one.split("=")[0] not in mine]
        return ranks(command, configure("llama", *given, *overrides), kill_at)

    converted = direct(command="convert")
    assert converted.code == 0, converted.output
    return direct


@slow
def test_a_release_that_has_changed_is_refused_by_the_tensor_s_name(direct, folder):
    name = "model.layers.1.mlp.up_proj.weight"
    (file,) = [one for one in (folder / "model").glob("*.safetensors") if name in load_file(one)]
    tensors = load_file(file)
    tensors[name][3, 3] += 1
    save_file(tensors, file, {"format": "pt"})
    trained = direct()
    said = f"1 tensors are not those that {folder / 'base'} was made from: {name};"
    assert trained.code == 2 and said in trained.output, trained.output
    assert not trained.metrics and not list((folder / "output").glob("checkpoints/iter_*"))


@slow
def test_a_release_of_another_date_and_the_same_numbers_is_taken(direct, folder):
    for file in (folder / "model").glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    trained = direct("train.steps=2")
    assert trained.code == 0, trained.output


@slow
def test_killed_it_goes_on_from_its_checkpoint_and_the_release(direct, folder):
    whole = direct("train.steps=4", f"paths.output={folder / 'whole'}")
    killed = direct("train.steps=4", "checkpoint.save_every=2", kill_at=3)
    assert killed.code == -9
    resumed = direct("train.steps=4", "checkpoint.save_every=2")
    assert resumed.code == 0, resumed.output
    losses = [[line["lm_loss"] for line in one.metrics if line["kind"] == "train"] for one in (whole, resumed)]
    assert losses[0] == losses[1]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@slow
@pytest.mark.timeout(1800)
def test_killed_at_any_moment_of_the_load_it_changes_nothing_and_begins_again(direct, folder):
    two = ("layout.gpus_per_node=2", "layout.tp=2", "train.steps=2")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs/kill.json").write_text("{}")
    whole = direct(*two, f"paths.output={folder / 'whole'}", command="killed_load")
    assert whole.code == 0, whole.output
    pieces = [int((folder / f"logs/read-{rank}.txt").read_text()) for rank in (0, 1)]
    before = {name: content(folder / name) for name in ("model", "base")}
    for kill in range(20):
        wish = {"rank": kill % 2, "pieces": random.randrange(pieces[kill % 2])}
        (folder / "logs/kill.json").write_text(json.dumps(wish))
        killed = direct(*two, command="killed_load")
        assert (killed.code, killed.metrics) == (-9, []), (wish, killed.output)
        assert {name: content(folder / name) for name in before} == before, wish
        assert not list((folder / "output").glob("checkpoints/iter_*")), wish
    again = direct(*two)
    assert again.code == 0, again.output
    losses = [[line["lm_loss"] for line in one.metrics if line["kind"] == "train"] for one in (whole, again)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


@slow
def test_it_goes_on_from_a_converted_base_of_the_same_release(direct, folder):
    first = direct("train.steps=4", "checkpoint.save_every=2", "train.stop_after=2")
    assert first.code == 0, first.output
    converted = direct("convert.to=torch_dist", command="convert")
    assert converted.code == 0 and "holds all" in converted.output, converted.output
    second = direct("train.steps=4", "checkpoint.save_every=2")
    assert second.code == 0 and len(second.metrics) >= 4, second.output
