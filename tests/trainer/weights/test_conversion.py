"""A conversion makes what Megatron-Bridge's import makes, and one that was killed goes on where it was."""

import filecmp
import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from contract.output_marks import PARTIAL
from trainer.rehearsal import tiny_models
from trainer.weights import atomic_folder, torch_dist

slow = pytest.mark.slow
BRIDGE = [
    ("glm4-moe-mtp", "bf16", "", ()),
    ("llama", "fp32", "tp=2 gpus_per_node=2", ()),  # a padded vocabulary
    *[
        pytest.param(kind, precision, cut, more, marks=slow)
        for kind, cut in [
            ("glm4-moe", "ep=2 gpus_per_node=2"),
            ("glm4-moe-mtp", ""),
            ("deepseek-v3", ""),
            ("qwen3-moe", "tp=2 sp=true etp=2 gpus_per_node=2"),
            ("qwen3", ""),  # tied embeddings
            ("llama", ""),
        ]
        for precision in ("fp32", "bf16")
        for more in [(), ("model.mtp=false",)]
        if not more or kind == "glm4-moe-mtp"
    ],
]


@pytest.fixture
def converted(configure, ranks, tmp_path):
    """converted(kind, base, *overrides, command="convert", kill=None) -> the run's result; the model is made once."""

    def converted(kind: str, base: str, *overrides: str, command: str = "convert", kill: dict | None = None):
        if not (tmp_path / "model").exists():
            tiny_models.make_model(kind, tmp_path / "model", dtype="float32")
        if kill:
            command = "killed_convert"
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out/kill.json").write_text(json.dumps(kill))
        paths = [f"paths.model={tmp_path / 'model'}", f"paths.base={tmp_path / base}", f"paths.output={tmp_path}/out"]
        return ranks(command, configure(kind, *paths, f"paths.logs={tmp_path}/logs", *overrides))

    return converted


@pytest.mark.parametrize(("kind", "precision", "cut", "more"), BRIDGE)
def test_the_base_is_what_bridge_makes(kind, precision, cut, more, converted, tmp_path):
    overrides = [f"train.precision={precision}", *(f"layout.{pair}" for pair in cut.split()), *more]
    for base, command in (("ours", "convert"), ("bridges", "bridge_base")):
        result = converted(kind, base, *overrides, command=command)
        assert result.code == 0, result.output
    ours, bridges = (torch_dist.open_checkpoint(tmp_path / base / "iter_0000000") for base in ("ours", "bridges"))
    assert ours.metadata.state_dict_metadata.keys() == bridges.metadata.state_dict_metadata.keys()
    assert ours.places.keys() == bridges.places.keys()
    for name, place in bridges.places.items():
        mine, theirs = torch_dist.read(ours, ours.places[name]), torch_dist.read(bridges, place)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name


def finished(base: Path) -> dict[str, tuple[int, int]]:
    """Files of the shards that an attempt has finished, and what tells each from one that was written anew."""
    folder = base.with_name(base.name + PARTIAL)
    entries = sorted((folder / atomic_folder.JOURNAL).glob("*.json"))
    names = [f"__{path.stem}_0.distcp" for path in entries if json.loads(path.read_text())["places"]]
    return {name: _identity(folder / "iter_0000000" / name) for name in names}


def _identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def same_tensors(base: Path, other: Path) -> None:
    """The same bytes in all files that hold tensors or lead to them, of the same names."""
    names = sorted(path.name for path in (base / "iter_0000000").iterdir())
    assert names == sorted(path.name for path in (other / "iter_0000000").iterdir())
    for name in [f"iter_0000000/{name}" for name in names if name != "run_config.yaml"] + ["source.json"]:
        assert filecmp.cmp(base / name, other / name, shallow=False), name


def test_a_killed_conversion_goes_on_with_any_number_of_processes(converted, tmp_path):
    assert converted("glm4-moe-mtp", "undisturbed").code == 0
    base = tmp_path / "base"
    killed = converted("glm4-moe-mtp", "base", "layout.gpus_per_node=2", kill={"shards": 2})
    assert killed.code == -9, killed.output
    kept = finished(base)
    assert len(kept) > 1
    damaged = base.with_name(base.name + PARTIAL) / "iter_0000000" / min(kept)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    result = converted("glm4-moe-mtp", "base")
    assert result.code == 0, result.output
    same_tensors(tmp_path / "undisturbed", base)
    again = {file for file, before in kept.items() if _identity(base / "iter_0000000" / file) != before}
    assert again == {damaged.name}, "what is whole is not made twice, and what is damaged is"


@slow
def test_what_was_begun_of_another_base_is_not_gone_on_with(converted, tmp_path):
    assert converted("llama", "base", kill={"shards": 1}).code == -9
    assert converted("llama", "base", "train.precision=bf16").code == 0
    assert converted("llama", "undisturbed", "train.precision=bf16").code == 0
    same_tensors(tmp_path / "undisturbed", tmp_path / "base")


@slow
@pytest.mark.timeout(1800)
def test_killed_at_any_moment_it_makes_the_same_bytes(converted, tmp_path):
    two, base, start = "layout.gpus_per_node=2", tmp_path / "base", time.monotonic()
    assert converted("glm4-moe-mtp", "undisturbed", two).code == 0
    whole, kills = time.monotonic() - start, 0
    while kills < 20:
        before = finished(base) if base.with_name(base.name + PARTIAL).exists() else {}
        result = converted("glm4-moe-mtp", "base", two, kill={"seconds": random.uniform(0, whole)})
        assert result.code in (0, -9), result.output
        there = base if result.code == 0 else base.with_name(base.name + PARTIAL)
        if there.exists():
            again = [name for name, made in before.items() if _identity(there / "iter_0000000" / name) != made]
            assert not again, "a finished shard is made once"
        kills += result.code == -9
        if result.code == 0:
            same_tensors(tmp_path / "undisturbed", base)
            shutil.rmtree(base)
    assert converted("glm4-moe-mtp", "base", two).code == 0
    same_tensors(tmp_path / "undisturbed", base)
