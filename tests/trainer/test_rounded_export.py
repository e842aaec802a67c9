"""export.quantization: fp8 and int4 round any merged model; the formats' own libraries read the nearest codes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.model_files import weights as model_files
from contract import checkpoints
from tests.trainer.test_packed_for_vllm import by_library
from trainer.weights import released, released_tensors

slow = pytest.mark.slow
TARGETS = "adapter.targets=[linear_qkv,linear_fc2]"
ROWS = [
    ("qwen3", "int4"),
    ("qwen3", "fp8"),
    ("qwen3", "nvfp4"),
    ("qwen3", "mxfp4"),
    ("glm4-moe-mtp", "nvfp4"),
    ("glm4-moe-mtp", "int4"),
    ("glm4-moe-mtp", "fp8"),
    ("deepseek-v3", "int4"),
    ("qwen3-5", "nvfp4"),
]
QUICK = [("qwen3", "int4"), ("qwen3", "nvfp4")]
E2M1 = {"nvfp4": 16, "mxfp4": 32}  # numbers that share a scale
# Matrices that share a factor in nvfp4.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
LEFT = ("embed", "norm", "mlp.gate.", "lm_head", "shared_head", "rotary", "in_proj_a.", "in_proj_b.")


@pytest.fixture(scope="module")
def exported(configure, ranks, work):
    """exported(kind, form or None) -> the run of this export of one training per kind."""
    trained = set()

    def exported(kind: str, form: str | None):
        folder = work / "rounded" / kind
        keys = [f"paths.{name}={folder / name}" for name in ("base", "output", "logs")]
        keys += ["train.steps=3", "optimizer.lr=1e-2", "evaluate.tasks=[]"]
        keys += [TARGETS] if kind != "deepseek-v3" else ["adapter.targets=[linear_proj,linear_fc1]"]
        run = configure(kind, *keys, f"paths.export={folder / str(form)}", f"export.quantization={form or 'null'}")
        if not Path(run.paths.export).exists():
            for command in ["convert", "train"] * (kind not in trained) + ["export"]:
                done = ranks(command, run)
                assert done.code == 0, done.output[-3000:]
        trained.add(kind)
        return run

    return exported


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def nearest(weight: torch.Tensor, form: str, top: torch.Tensor) -> torch.Tensor:
    """Return a matrix rounded by the definition of the format, without this project's code."""
    if form in E2M1:
        return nearest_e2m1(weight, form, top)
    height, width = {"fp8": (128, 128), "int4": (1, 32)}[form]
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = blocks.abs().amax((1, 3), keepdim=True) / {"fp8": 448, "int4": 7}[form]
    if form == "int4":
        scales = scales.bfloat16().float()
        rounded = (blocks / scales).round().clamp(-8, 7)
    else:
        rounded = (blocks / scales).to(torch.float8_e4m3fn).float()
    return (rounded * scales).flatten(2, 3).flatten(0, 1)[:rows, :columns]


@pytest.mark.filterwarnings("ignore")  # of what the libraries import
@pytest.mark.parametrize(("kind", "form"), [pytest.param(*row, marks=slow if row not in QUICK else ()) for row in ROWS])
def test_the_formats_own_library_reads_the_nearest_codes_of_the_merged_model(kind, form, exported):
    merged = weights(f"{exported(kind, None).paths.export}/merged")  # in fp32, as the release
    run = exported(kind, form)
    folder = Path(run.paths.export) / "merged"
    config, found = json.loads((folder / "config.json").read_text()), weights(folder)
    again = released.read(folder)
    section, squares = config.pop("quantization_config"), torch.zeros(2, dtype=torch.float64)
    assert config == json.loads(Path(run.paths.model, "config.json").read_text())
    for name, tensor in merged.items():
        if any(part in name for part in LEFT) or tensor.dim() != 2:
            assert torch.equal(found[name], tensor), name
            continue
        read = by_library(found, name, section)
        assert torch.equal(released_tensors.read(again, name).to(read.dtype) + 0.0, read + 0.0), name
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        joined = next((leaves for leaves in JOINED if leaf in leaves), (leaf,))
        names = [f"{module}.{one}.weight" for one in joined]
        expected = nearest(tensor, form, torch.stack([merged[one].abs().max() for one in names]).max())
        assert (read != expected.bfloat16()).float().mean() < 1e-3, name  # an adapter's sum in another order
        squares += torch.stack([(expected - tensor).double().square().sum(), tensor.double().square().sum()])
    mark = checkpoints.read_mark(Path(run.paths.export))
    assert mark["codes"] == mark["rounding"]["to"] == form and mark["rounding"]["weights"] > 10
    assert mark["rounding"]["error"] == pytest.approx(float(squares[0] / squares[1]) ** 0.5, rel=1e-3)


def nearest_e2m1(weight: torch.Tensor, form: str, top: torch.Tensor) -> torch.Tensor:
    groups = weight.unflatten(1, (-1, E2M1[form]))
    largest = groups.abs().amax(2, keepdim=True)
    if form == "nvfp4":
        factor = top / (6 * 448)
        scales = (largest / (6 * factor)).to(torch.float8_e4m3fn).float() * factor
    else:
        scales = torch.exp2((largest / 6).log2().ceil())
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearby = ((groups / scales).abs().unsqueeze(-1) - values).abs().argmin(-1)
    return (values[nearby] * groups.sign() * scales).flatten(1)


def test_a_changed_scale_is_found_and_nothing_else(exported, ranks):
    run = exported("qwen3", "int4")
    done = ranks("proof.export", run)
    assert done.code == 0, done.output
    folder, name = Path(run.paths.export, "merged"), "model.layers.1.self_attn.q_proj.weight_scale"
    entry = model_files.tensors(folder)[name]
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.start)
        first = file.read(1)[0]
        for byte, code in (first ^ 1, 1), (first, 0):
            file.seek(entry.start)
            file.write(bytes([byte]))
            file.flush()
            done = ranks("proof.export", run)
            assert done.code == code and (f"{name}: is not" in done.output) == code, done.output
