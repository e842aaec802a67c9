"""A conversion makes what Bridge's import makes; one that was killed goes on where it was, and so does an export."""

import filecmp
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from contract.output_marks import JOURNAL, PARTIAL
from trainer.rehearsal import tiny_models
from trainer.weights import torch_dist

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
    """converted(kind, base, *overrides, command="convert", kill=None) -> the run's result; the model is made once.

    `kill`: when it dies, as tests/support/ranks/killed_writer.py says.
    """

    def converted(kind: str, base: str, *overrides: str, command: str = "convert", kill: dict | None = None):
        if not (tmp_path / "model").exists():
            tiny_models.make_model(kind, tmp_path / "model", dtype="float32")
        if kill is not None:
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out/kill.json").write_text(json.dumps({"command": command} | kill))
            command = "killed_writer"
        places = {"model": "model", "base": base, "output": "out", "export": "export", "logs": "logs"}
        paths = [f"paths.{name}={tmp_path / place}" for name, place in places.items()]
        return ranks(command, configure(kind, *paths, "export.checkpoint=base", *overrides))

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
    offsets = [piece.offset for piece in ours.metadata.storage_data.values()]
    assert not any(offset % torch_dist.ALIGNED for offset in offsets), "numbers that cannot be mapped"


def noted(made: Path) -> set[int]:
    """Units that an attempt has finished."""
    folder = made.with_name(made.name + PARTIAL) / JOURNAL
    return {int(path.stem) for path in folder.glob("*.json")}


def begun(folder: Path) -> list[int]:
    """Units that were begun since this was asked the last time."""
    path = folder / "out/begun.txt"
    numbers = [int(line) for line in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return numbers


def same_tensors(base: Path, other: Path) -> None:
    """The same bytes in all files that hold tensors or lead to them, of the same names."""
    names = sorted(path.name for path in (base / "iter_0000000").iterdir())
    assert names == sorted(path.name for path in (other / "iter_0000000").iterdir())
    for name in [f"iter_0000000/{name}" for name in names if name != "run_config.yaml"] + ["source.json"]:
        assert filecmp.cmp(base / name, other / name, shallow=False), name


def same_as_released(model: Path, export: Path) -> None:
    for file in model.iterdir():
        assert filecmp.cmp(file, export / "merged" / file.name, shallow=False), file.name


def test_a_killed_conversion_goes_on_with_any_number_of_processes(converted, tmp_path):
    assert converted("llama", "undisturbed", kill={}).code == 0
    base, every = tmp_path / "base", begun(tmp_path)
    killed = converted("llama", "base", "layout.gpus_per_node=2", kill={"units": 3})
    assert killed.code == -9, killed.output
    kept = noted(base)
    assert len(kept) > 2 and begun(tmp_path)
    folder = base.with_name(base.name + PARTIAL) / "iter_0000000"
    damaged = next(number for number in sorted(kept) if (folder / f"__{number}_0.distcp").exists())
    content = (folder / f"__{damaged}_0.distcp").read_bytes()
    (folder / f"__{damaged}_0.distcp").write_bytes(content[:-1] + b"?")
    result = converted("llama", "base", kill={})
    assert result.code == 0, result.output
    assert {*begun(tmp_path)} == {*every} - kept | {damaged}, "what is whole is not made twice, and what is damaged is"
    same_tensors(tmp_path / "undisturbed", base)


@slow
def test_a_killed_packing_takes_the_files_that_it_had_finished_and_makes_the_same(converted, tmp_path):
    asked = ["convert.to=packed", "model.base=nvfp4"]
    assert converted("glm4-moe", "undisturbed", *asked, kill={}).code == 0
    base, other = tmp_path / "base", tmp_path / "undisturbed"
    killed = converted("glm4-moe", "base", "layout.gpus_per_node=2", *asked, kill={"units": 3, "journal": "packed"})
    assert killed.code == -9, killed.output
    partial = base.with_name(base.name + PARTIAL)
    kept = {path.stem for path in (partial / JOURNAL / "packed").glob("*.json")}
    times = {int(number): (partial / f"packed/{int(number):05d}.safetensors").stat().st_mtime_ns for number in kept}
    assert 2 < len(kept) < len([*(other / "packed").iterdir()]) - 1
    result = converted("glm4-moe", "base", *asked, kill={})
    assert result.code == 0, result.output
    assert {number: (base / f"packed/{number:05d}.safetensors").stat().st_mtime_ns for number in times} == times
    for file in (other / "packed").iterdir():
        assert filecmp.cmp(file, base / "packed" / file.name, shallow=False), file.name


def test_a_killed_process_that_packs_is_named_and_the_next_attempt_goes_on(converted, tmp_path):
    asked = ["convert.to=packed", "model.base=int4"]
    killed = converted("glm4-moe", "base", *asked, kill={"process": True})
    assert killed.code == 2 and "packed: a process that packs was killed; the host may lack memory" in killed.output
    assert not (tmp_path / "base").exists()
    assert converted("glm4-moe", "base", *asked, kill={}).code == 0


def test_a_killed_export_goes_on_with_any_number_of_processes(converted, tmp_path):
    assert converted("llama", "base").code == 0
    assert converted("llama", "base", "layout.gpus_per_node=2", command="export", kill={"units": 3}).code == -9
    begun(tmp_path)
    kept = noted(tmp_path / "export")
    assert len(kept) > 2
    result = converted("llama", "base", command="export", kill={})
    assert result.code == 0, result.output
    again = begun(tmp_path)
    assert again and not kept & {*again}, "what is whole is not made twice"
    same_as_released(tmp_path / "model", tmp_path / "export")


@slow
def test_what_was_begun_of_another_base_is_not_gone_on_with(converted, tmp_path):
    assert converted("llama", "base", kill={"units": 1}).code == -9
    assert converted("llama", "base", "train.precision=bf16").code == 0
    assert converted("llama", "undisturbed", "train.precision=bf16").code == 0
    same_tensors(tmp_path / "undisturbed", tmp_path / "base")


@slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", ["convert", "export"])
def test_killed_at_any_moment_it_makes_the_same_bytes(command, converted, tmp_path):
    assert converted("llama", "undisturbed", "layout.gpus_per_node=2", kill={}).code == 0
    assert converted("llama", "base").code == 0
    made, units = tmp_path / {"convert": "base", "export": "export"}[command], len(begun(tmp_path))
    shutil.rmtree(made, ignore_errors=True)
    for kill in range(20):
        before = noted(made)
        wish = {"seconds": random.uniform(0, 0.005 * units), "rank": kill % 2}
        result = converted("llama", "base", "layout.gpus_per_node=2", command=command, kill=wish)
        assert result.code in (0, -9), result.output
        times = Counter(begun(tmp_path))
        assert not before & {*times}, "a finished unit is made once"
        if result.code == 0:  # it was done before its time
            shutil.rmtree(made)
    assert converted("llama", "base", "layout.gpus_per_node=2", command=command, kill={}).code == 0
    if command == "convert":
        same_tensors(tmp_path / "undisturbed", made)
    else:
        same_as_released(tmp_path / "model", made)
