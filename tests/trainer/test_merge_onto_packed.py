"""export.merge_onto: packed gives the model that was trained, and nearer than a merge onto the released weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.model_files import safetensors_header
from trainer.serving import agreement
from trainer.weights.packed_base import files
from trainer.weights.quantised import report

slow = pytest.mark.slow
RANKS = Path(__file__).parents[1] / "support" / "ranks"
FROM_TRAINING = "from-training.jsonl"
TWO = "layout.gpus_per_node=2"
ROWS = [
    ("glm4-moe", "int4", ["adapter.targets=[linear_qkv,linear_fc2]", "convert.to=none", TWO, "layout.ep=2"], False),
    ("llama", "nvfp4", ["convert.to=packed", "export.formats=[merged]"], True),
    ("llama", "fp8", [TWO, "layout.tp=2", "layout.sp=true"], True),
    ("gpt2", "int4", ["adapter.targets=[linear_qkv,linear_fc1]"], True),
    ("glm4-moe", "mxfp4", ["convert.to=none", TWO, "layout.ep=2"], True),
]


@pytest.fixture(params=[pytest.param(row[:3], marks=slow if row[3] else (), id="-".join(row[:2])) for row in ROWS])
def trained(request, configure, ranks, tmp_path):
    """run(*overrides) of a finished training on a packed base, and what its conversion and training have printed."""
    kind, form, more = request.param
    paths = [f"paths.{name}={tmp_path / name}" for name in ("base", "output", "logs", "parity")]
    shared = [*paths, f"model.base={form}", *more, "train.steps=4", "optimizer.lr=2e-3", "evaluate.parity_rows=3"]

    def run(*overrides: str):
        mine = {one.partition("=")[0] for one in overrides}
        return configure(kind, *(one for one in shared if one.partition("=")[0] not in mine), *overrides)

    for command in ("convert", "train"):
        done = ranks(command, run())
        assert done.code == 0, done.output[-3000:]
    return run


def log_probs(rows: list[dict], models: dict[str, Path], folder: Path) -> dict[str, list[list[float]]]:
    """What transformers says of the tokens, by name of the model."""
    jobs = [
        {"model": str(model), "adapter": None, "tokens": [row["tokens"]], "out": str(folder / f"{name}-{number}.pt")}
        for name, model in models.items()
        for number, row in enumerate(rows)
    ]
    command = [sys.executable, RANKS / "hf_logits.py"]
    done = subprocess.run(command, input=json.dumps(jobs), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for job in jobs:
        logits, tokens = torch.load(job["out"])[0].log_softmax(-1), torch.tensor(job["tokens"][0])
        found.append(logits[:-1].gather(1, tokens[1:, None]).flatten().tolist())
    return {name: found[at * len(rows) : (at + 1) * len(rows)] for at, name in enumerate(models)}


def test_the_merged_model_is_the_trained_one_and_the_report_says_how_far_either_is(trained, ranks, tmp_path):
    record = json.loads((tmp_path / "parity").read_text())
    runs, distances = {}, {}
    for onto in ("packed", "released"):
        runs[onto] = trained(f"export.merge_onto={onto}", f"paths.export={tmp_path / onto}")
        done = ranks("export", runs[onto])
        assert done.code == 0, done.output[-3000:]
        assert f"merged onto the {onto} weights" in done.output
    found = log_probs(record["rows"], {onto: tmp_path / onto / "merged" for onto in runs}, tmp_path)
    for onto, run in runs.items():
        # What FP8 rounds of so small a model is within the wide bound: there the narrow one tells both apart.
        narrow = onto == "packed" or run.model.base == "fp8"
        bound = agreement.BOUNDS["fp32" if narrow else "packed"]
        parity = agreement.judge(record, found[onto], bound)
        assert parity["ok"] == (onto == "packed"), parity["faults"]
        distances[onto] = parity["mean"]
    assert distances["packed"] < 1e-4 < 1e-2 < distances["released"]
    lines = {onto: told(tmp_path / onto / FROM_TRAINING) for onto in ("packed", "released")}
    of_training = told(tmp_path / "output" / report.NAME)
    assert lines["packed"].keys() == lines["released"].keys() == of_training.keys()
    for name, line in lines["packed"].items():
        assert line["packed"] < 1e-6  # fp32
        assert line["released"] == pytest.approx(of_training[name]["error"], rel=0.05)
        assert lines["released"][name]["released"] == of_training[name]["error"]
    whole = json.loads((tmp_path / "packed" / "complete.json").read_text())["from_training"]
    assert whole["matrices"] == len(of_training) and whole["packed"] < 1e-6 < 0.02 < whole["released"]


def told(file: Path) -> dict[str, dict]:
    return {line["tensor"]: line for line in map(json.loads, file.read_text().splitlines()[1:])}


@pytest.mark.parametrize("trained", [pytest.param(ROWS[1][:3], id="llama")], indirect=True)
def test_other_numbers_than_those_of_training_are_not_merged_onto(trained, configure, ranks, tmp_path):
    """A byte of a base's codes that has changed, a training in another format, and one that wrote nothing down."""
    run = trained("export.merge_onto=packed", f"paths.export={tmp_path / 'export'}")
    (file,) = (tmp_path / "base/packed").glob("*.safetensors")
    shutil.copyfile(file, tmp_path / "kept")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    weights = load_file(file)
    weights |= {f"{name}.factors": weights[f"{name}.factors"] * 1.05}
    save_file(weights, file)
    assert safetensors_header.read(file).keys() == safetensors_header.read(tmp_path / "kept").keys()
    done = ranks("export", run)
    assert done.code == 2 and f"damaged: {name}.factors is not as it was written" in done.output
    index = json.loads((file.parent / files.INDEX).read_text())
    index[name] = files.with_sums(index[name], weights, name)  # as another conversion would have written it
    (file.parent / files.INDEX).write_text(json.dumps(index))
    done = ranks("export", run)
    assert done.code == 2 and f"1 packed matrices are not those that training had: {name} (" in done.output
    shutil.copyfile(tmp_path / "kept", file)
    done = ranks(
        "export", trained("export.merge_onto=packed", "model.base=int4", f"paths.export={tmp_path / 'export'}")
    )
    assert done.code == 2 and "was trained on nvfp4, and model.base is int4; model.base=nvfp4" in done.output
    (tmp_path / "output" / report.NAME).unlink()
    done = ranks("export", run)
    assert done.code == 2 and f"{report.NAME}: No such file" in done.output


@slow
@pytest.mark.parametrize("trained", [("qwen3-5", "int4", ["convert.to=packed"])], indirect=True)
def test_weights_in_sections_are_refused_in_a_line(trained, ranks, tmp_path):
    done = ranks("export", trained("export.merge_onto=packed", f"paths.export={tmp_path / 'export'}"))
    assert done.code == 2 and "in_proj.weight in sections, whose errors cannot be compared; released" in done.output


def test_a_merge_onto_packed_weights_is_held_to_a_narrow_bound(configure):
    """And the base's evaluation is the same artifact for both, so it writes down what the other one needs."""
    from conf.rules import serving

    packed = configure("llama", "model.base=fp8", "export.merge_onto=packed", "train.precision=bf16")
    assert not serving.is_apart(packed) and serving.may_be_apart(packed)
    assert serving.is_apart(configure("llama", "model.base=fp8"))
    quantised = configure("llama", "model.base=fp8", "export.merge_onto=packed", "train.precision=bf16")
    quantised = quantised.model_copy(update={"evaluate": quantised.evaluate.model_copy(update={"quantization": "fp8"})})
    assert serving.is_apart(quantised)
