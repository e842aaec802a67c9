"""A base that is packed once (convert.to: packed) is what packing it at each start gives, to the last bit."""

import json
import shutil
from pathlib import Path

import pytest

from conf.model_files import safetensors_header
from contract import checkpoints
from contract.faults import Fault
from trainer.checks import inputs
from trainer.rehearsal import tiny_models
from trainer.weights import released
from trainer.weights.quantised import report

slow = pytest.mark.slow
STEPS = ["train.steps=2", "optimizer.lr=1e-3"]
TWO = ["layout.gpus_per_node=2"]
CUTS = {
    "alone": [],
    "tp2": [*TWO, "layout.tp=2", "layout.sp=true"],
    "etp2": [*TWO, "layout.tp=2", "layout.sp=true", "layout.etp=2"],
    "ep2": [*TWO, "layout.ep=2"],
    "pp2": [*TWO, "layout.pp=2"],
    "experts apart": ["moe.grouped_gemm=false"],
}
ROWS = [
    ("glm4-moe", "fp8", "etp2", False),
    ("glm4-moe-mtp", "nvfp4", "ep2", True),
    ("glm4-moe-mtp", "int4", "pp2", True),
    ("glm4-moe", "mxfp4", "etp2", True),
    ("glm4-moe", "nvfp4", "etp2", True),
    ("glm4-moe", "fp8", "experts apart", True),
    ("deepseek-v3", "fp8", "tp2", True),
    ("deepseek-v3", "nvfp4", "tp2", True),
    ("llama", "int4", "tp2", True),
    ("gpt2", "int4", "tp2", True),
    ("qwen3-next-mtp", "fp8", "tp2", True),
    ("nemotron-h-mtp", "fp8", "ep2", True),
]


@pytest.fixture
def once(configure, ranks, tmp_path):
    """once(command, kind, *overrides) -> what it did, with a packed base of the test's own."""

    def once(command: str, kind: str, *overrides: str):
        paths = [f"paths.{name}={tmp_path / name}" for name in ("base", "output", "logs")]
        mine = {one.partition("=")[0] for one in overrides}
        paths = [one for one in [*paths, "convert.to=packed"] if one.partition("=")[0] not in mine]
        return ranks(command, configure(kind, *paths, *overrides))

    return once


def losses(done) -> list[float]:
    assert done.code == 0, done.output[-3000:]
    return [line["lm_loss"] for line in done.metrics if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("kind", "form", "cut"), [pytest.param(*row[:3], marks=slow if row[3] else ()) for row in ROWS]
)
def test_losses_are_those_of_packing_at_each_start_to_the_last_bit(kind, form, cut, once, base, configure, tmp_path):
    base(kind)
    made = once("convert", kind, f"model.base={form}")
    assert made.code == 0 and f"holds, in {form}, all" in made.output, made.output[-3000:]
    shared = [f"model.base={form}", *STEPS, *CUTS[cut]]
    found = losses(once("train", kind, *shared))
    anew = [f"paths.base={configure(kind).paths.base}", "convert.to=torch_dist", f"paths.output={tmp_path / 'anew'}"]
    assert found == losses(once("train", kind, *shared, *anew)) and len(found) == 2
    assert sum(file.stat().st_size for file in (tmp_path / "base").rglob("*.distcp")) < 2**20
    of_base, of_run, of_anew = (reported(tmp_path / name) for name in ("base", "output", "anew"))
    assert of_base[1:] == of_run[1:] and of_run[0]["bytes_of_ranks"] == of_anew[0]["bytes_of_ranks"]
    assert {row["tensor"] for row in of_base[1:]} == {row["tensor"] for row in of_anew[1:]}


def reported(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / report.NAME).read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "packed").iterdir()}


@slow
def test_two_processes_write_the_same_files_as_one_and_what_is_there_is_left_alone(once, tmp_path):
    asked = ["model.base=nvfp4"]
    assert once("convert", "glm4-moe", *asked).code == 0
    expected = content(tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    assert once("convert", "glm4-moe", *asked, *TWO, "layout.tp=1", "layout.ep=2").code == 0
    assert content(tmp_path / "base") == expected
    again = once("convert", "glm4-moe", *asked)
    assert again.code == 0 and "already exists" in again.output


def test_a_base_in_another_format_is_refused_in_one_line(configure, tmp_path):
    checkpoints.mark(tmp_path, to="packed", base="int4")
    with pytest.raises(Fault, match=r"holds weights in int4, but model\.base is fp8"):
        inputs.check_train(configure("llama", f"paths.base={tmp_path}", "model.base=fp8"))


@pytest.mark.parametrize("to", ["packed", "torch_dist"])
def test_a_base_of_another_release_is_refused_before_anything_is_packed(to, configure, tmp_path):
    """A larger model has a part of every matrix of a smaller one, which would be trained on without a word."""
    (tmp_path / released.SOURCE).write_text('{"model.norm.weight": ["F32", [999999], "0"]}')
    checkpoints.mark(tmp_path, **({"to": "packed", "base": "fp8"} if to == "packed" else {}))
    with pytest.raises(Fault, match=r"paths\.base: .*: made from another release than paths\.model, .*: lm"):
        inputs.check_train(configure("llama", f"paths.base={tmp_path}", "model.base=fp8"))


@slow
@pytest.mark.parametrize("kind", ["glm4-moe", "deepseek-v3-fp8"])
def test_verify_proves_the_files_and_names_a_byte_that_has_changed(kind, once, tmp_path):
    tiny_models.make_model(kind, tmp_path / "model", dtype="float32", block=128 if "fp8" in kind else 0)
    asked = [kind.removesuffix("-fp8"), "model.base=fp8", f"paths.model={tmp_path / 'model'}"]
    assert once("convert", *asked).code == 0
    found = once("proof.base", *asked)
    assert found.code == 0 and "packed in fp8" in found.output, found.output
    (file,) = (tmp_path / "base/packed").glob("*.safetensors")
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    place = safetensors_header.read(file)[f"{name}.codes"]
    with file.open("r+b") as f:
        f.seek(place.start)
        byte = f.read(1)
        f.seek(place.start)
        f.write(bytes([byte[0] ^ 1]))
    trained = once("train", *asked, *STEPS)
    assert trained.code == 2 and f"damaged: {name}.codes is not as it was written" in trained.output
    assert not (tmp_path / "output" / "checkpoints").exists()
    found = once("proof.base", *asked)
    lines = [line for line in found.output.splitlines() if line.startswith("differs: ")]
    assert found.code == 1 and len(lines) == 1 and name in lines[0], found.output
