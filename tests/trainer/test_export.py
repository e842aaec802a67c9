"""What was trained is what is exported: transformers and PEFT compute Megatron's logits from it.

Families without a case here are in tests/trainer/test_families.py.
"""

import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

from conf.load import load
from contract import checkpoints
from tests.support import drawn_models
from trainer import export
from trainer.serving.adapter_coverage import require_whole
from trainer.weights import released

RANKS = Path(__file__).parents[1] / "support" / "ranks"
BOUND = 1e-4  # of the largest logit; what is found is 3e-6 and less
ROUNDING = 1e-6
TOKENS = drawn_models.tokens(rows=2, length=48, vocabulary=500)
MLA = "[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj,linear_fc1,linear_fc2]"


@dataclass(frozen=True)
class Case:
    """A checkpoint, trained or with invented values. All are exported on one process."""

    kind: str
    settings: tuple[str, ...] = ()
    layout: str = ""  # of its training; without one, the values are invented
    convert: str = ""
    bridge: bool = True  # Megatron-Bridge can merge it


CASES = {
    "lora": Case("glm4-moe-mtp", (), "tp=2 sp=true ep=2 gpus_per_node=2", "pp=2 gpus_per_node=2"),
    "lora shared by experts": Case("glm4-moe", ("adapter.experts=shared",), "ep=2 gpus_per_node=2"),
    "lora, stacked layers": Case("qwen3-moe"),
    "lora, latent attention": Case("deepseek-v3", (f"adapter.targets={MLA}",)),
    "lora, experts' fc2 alone": Case("glm4-moe", ("adapter.targets=[linear_fc2]",)),
    "dora": Case("llama", ("adapter.kind=dora",), "tp=2 gpus_per_node=2"),
    "dora, biases": Case("glm4-moe", ("adapter.kind=dora", "adapter.targets=[linear_qkv,linear_proj]")),
    "full, tied": Case("qwen3", ("adapter.kind=none",), "pp=2 gpus_per_node=2"),
    "lora, stacked experts": Case("gpt-oss", (), "ep=2 gpus_per_node=2", bridge=False),
    "lora, norms after layers": Case("gemma3-text", (), "tp=2 sp=true gpus_per_node=2"),
    "dora, norms after layers": Case("gemma3-text", ("adapter.kind=dora",), "tp=2 sp=true gpus_per_node=2"),
    "full, norms after layers": Case("gemma3-text", ("adapter.kind=none",), "pp=2 gpus_per_node=2"),
    "lora, experts next to an mlp": Case("gemma4-text", (), "tp=2 sp=true ep=2 gpus_per_node=2", bridge=False),
    "full, experts next to an mlp": Case("gemma4-text", ("adapter.kind=none",), "pp=2 gpus_per_node=2"),
    "lora, layers that share": Case("gemma4", (), "tp=2 sp=true gpus_per_node=2", bridge=False),
    "full, layers that share": Case("gemma4", ("adapter.kind=none",), "tp=2 sp=true gpus_per_node=2"),
    "full, stacked experts": Case("gpt-oss", ("adapter.kind=none",), "pp=2 gpus_per_node=2"),
    "lora, layers of one block": Case("nemotron-h-latent", ("adapter.targets=all-linear",), "ep=2 gpus_per_node=2"),
    "full, layers of one block": Case("nemotron-h", ("adapter.kind=none",), "tp=2 sp=true gpus_per_node=2"),
    "lora, MTP after delta nets": Case("qwen3-next-mtp", (), "ep=2 gpus_per_node=2", "pp=2 gpus_per_node=2"),
    "full, MTP after delta nets": Case("qwen3-5-moe-mtp", ("adapter.kind=none",), "pp=2 ep=2 gpus_per_node=4"),
    "lora, MTP of two blocks": Case("nemotron-h-mtp", ("adapter.targets=all-linear",), "pp=2 ep=2 gpus_per_node=4"),
    "full, MTP of two blocks": Case("nemotron-h-mtp", ("adapter.kind=none",), "tp=2 sp=true ep=2 gpus_per_node=2"),
    "full": Case("glm4-moe-mtp", ("adapter.kind=none",), "tp=2 sp=true ep=2 gpus_per_node=2"),
}
QUICK = ("lora", "lora shared by experts", "lora, latent attention", "dora", "full, tied", "lora, stacked experts")
QUICK += ("lora, MTP after delta nets",)
LORA = [name for name, case in CASES.items() if name.startswith("lora") and case.bridge]
ADAPTERS = [name for name in CASES if not name.startswith("full")]
FIRST = {case.kind: name for name, case in reversed(CASES.items())}


def each(names, quick):
    """Parameters of a test: those that are quick, and the others for the slow run."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def cases(request) -> dict[str, Case]:
    """Those that are asked for by their names, the first of each kind that is, and what tests without either use."""
    asked = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {one.params.get("name") or FIRST.get(one.params.get("kind")) for one in asked if one}
    names |= {FIRST[kind] for kind in ("glm4-moe-mtp", "glm4-moe", "gpt-oss")}
    return {name: case for name, case in CASES.items() if name in names}


@pytest.fixture(scope="module")
def exported(cases, configure, ranks, work):
    """Run by name of case and kind of model: the cases' exports, and the models' bases."""
    runs = {}
    bases = {}
    for name, case in cases.items():
        folder = work / "exports" / name.replace(" ", "-").replace("'", "").replace(",", "")
        paths = (f"paths.output={folder}/output", f"paths.export={folder}/export", f"paths.base={work}/{case.kind}-b")
        settings = (*case.settings, *paths, "train.steps=3", "optimizer.lr=1e-2")
        runs[name] = configure(case.kind, *settings)
        if case.kind not in bases:
            bases[case.kind] = configure(case.kind, *paths)
            done(ranks("convert", configure(case.kind, *paths, *cut(case.convert))))
        if case.layout:
            done(ranks("train", configure(case.kind, *settings, *cut(case.layout))))
    return SimpleNamespace(runs=runs, bases=bases)


@pytest.fixture(scope="module")
def megatron(cases, exported, ranks, megatron_logits):
    """Logits and Bridge's exported weights by name; exports, once Megatron has invented what was not trained."""
    found = {name: megatron_logits(run, tokens=TOKENS) for name, run in exported.bases.items()}
    for name, case in cases.items():
        folder = Path(exported.runs[name].paths.output) / "checkpoints"
        what, step = ("checkpoint", 3) if case.layout else ("invent", 1)
        asked = {what: str(checkpoints.step_folder(folder, step))} | ({} if case.bridge else {"alone": True})
        found[name] = megatron_logits(exported.runs[name], tokens=TOKENS, **asked)
    assert None not in found.values()
    for run in exported.runs.values():
        done(ranks("export", run))
    return found


@pytest.fixture(scope="module")
def transformers(megatron, exported, work):
    """Logits by (name, "base", "merged" or "adapter")."""
    jobs = {(kind, "base"): (run.paths.model, None) for kind, run in exported.bases.items()}
    for name, run in exported.runs.items():
        jobs[name, "merged"] = (f"{run.paths.export}/merged", None)
        if name in ADAPTERS:
            jobs[name, "adapter"] = (run.paths.model, f"{run.paths.export}/adapter")
    outs = {key: f"{work}/transformers-{number}.pt" for number, key in enumerate(jobs)}
    lines = [{"model": m, "adapter": a, "tokens": TOKENS, "out": outs[key]} for key, (m, a) in jobs.items()]
    command = [sys.executable, RANKS / "hf_logits.py"]
    found = subprocess.run(command, input=json.dumps(lines), text=True, capture_output=True)
    assert found.returncode == 0, found.stderr[-4000:]
    return {key: torch.load(out) for key, out in outs.items()}


def cut(layout: str) -> list[str]:
    return [f"layout.{pair}" for pair in layout.split()]


def done(result) -> None:
    assert result.code == 0, result.output[-4000:]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", each(sorted(FIRST), {CASES[name].kind for name in QUICK}))
def test_the_converted_model_is_the_released_one(kind, megatron, transformers):
    assert difference(megatron[kind]["logits"], transformers[kind, "base"]) < BOUND


@pytest.mark.parametrize("name", each(CASES, QUICK))
def test_training_has_changed_the_logits(name, megatron, exported):
    """Else the comparisons below would prove nothing."""
    assert difference(megatron[name]["logits"], megatron[CASES[name].kind]["logits"]) > 100 * BOUND


@pytest.mark.parametrize("name", each(CASES, QUICK))
def test_the_merged_model_is_the_trained_one(name, megatron, transformers):
    assert difference(transformers[name, "merged"], megatron[name]["logits"]) < BOUND


@pytest.mark.parametrize("name", each(ADAPTERS, QUICK))
def test_the_adapter_makes_the_trained_model_of_the_released_one(name, exported, megatron, transformers):
    assert difference(transformers[name, "adapter"], megatron[name]["logits"]) < BOUND
    paths = exported.runs[name].paths
    require_whole(Path(paths.export) / "adapter", Path(paths.model))


@pytest.mark.parametrize("name", each([*LORA, *(name for name in CASES if name.startswith("full"))], QUICK))
def test_weights_are_those_that_bridge_exports(name, megatron, exported):
    """MTP included: its attention has changed. Bridge leaves out copies, and merges no magnitudes of DoRA."""
    ours, bridges = weights(Path(exported.runs[name].paths.export) / "merged"), megatron[name]["weights"]
    copies = {n for n in ours if n.endswith((".shared_head.head.weight", "layers.4.embed_tokens.weight"))}
    untrained = released.copied(released.read(Path(exported.runs[name].paths.model)))
    assert ours.keys() - copies - untrained == bridges.keys() - untrained
    ahead = {
        n for n in ours if n.startswith(("mtp.", "model.layers.4.")) and n.endswith(("q_proj.weight", "o_proj.weight"))
    }
    before = weights(exported.runs[name].paths.model)
    assert not [n for n in ahead if torch.equal(ours[n], before[n])]
    assert {n: d for n in bridges if (d := difference(ours[n], bridges[n].to(ours[n].dtype))) > ROUNDING} == {}
    assert all(
        torch.equal(ours[n], ours["lm_head.weight" if "head" in n else "model.embed_tokens.weight"]) for n in copies
    )


@pytest.mark.parametrize("name", each(ADAPTERS, QUICK))
def test_what_has_no_adapter_stays_as_released(name, exported):
    run = exported.runs[name]
    before, after = weights(run.paths.model), weights(Path(run.paths.export) / "merged")
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed
    assert not any("norm" in n or "embed" in n or "mlp.gate." in n or n.endswith("bias") for n in changed)
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}


def test_the_export_is_whole_and_readable(megatron, exported):
    run = exported.runs["lora"]
    folder = Path(run.paths.export)
    facts = checkpoints.require(folder, "", "")
    assert facts["step"] == 3
    assert len(facts["chat_template"]) == 64
    assert all(name.startswith("model.layers.4.") for name in facts["left_out"])
    assert {oct(file.stat().st_mode & 0o777) for file in folder.glob("*/*")} == {"0o644"}
    released = {file.name for file in Path(run.paths.model).iterdir()}
    assert {file.name for file in (folder / "merged").iterdir()} == released
    assert not folder.with_name("export.partial").exists()


def save(stored: dict[str, torch.Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is but one process
        save_torch_dist(stored, checkpoint_id=folder, no_dist=True)
    (folder / "run_config.yaml").write_text("peft: {dim: 8, alpha: 16}\n")
    checkpoints.mark(folder)


def adapter_of(layer: str, out: int, width: int = 128) -> dict[str, torch.Tensor]:
    return {f"{layer}.adapter.linear_in.weight": torch.ones(8, width)} | {
        f"{layer}.adapter.linear_out.weight": torch.ones(out, 8)
    }


@pytest.mark.parametrize(
    "stored",
    [
        adapter_of("decoder.layers.9.self_attention.linear_proj", 128, 256),
        adapter_of("decoder.layers.0.self_attention.linear_proj", 128, 128),
        adapter_of("decoder.layers.0.self_attention.linear_qkv", 500),
        adapter_of("decoder.layers.0.self_attention.linear_new", 512),
        dict([adapter_of("decoder.layers.0.self_attention.linear_qkv", 512).popitem()]),
        {"decoder.layers.0.self_attention.linear_qkv.adapter.linear_mid.weight": torch.ones(8, 8)},
    ],
    ids=["no such layer", "wrong width", "wrong height", "no such weight", "half an adapter", "unknown tensor"],
)
def test_an_adapter_that_finds_no_place_is_named(stored, configure, ranks, exported, tmp_path):
    base = exported.bases["glm4-moe"].paths.base
    folder = tmp_path / "output/checkpoints/iter_0000001"
    good = adapter_of("decoder.layers.1.self_attention.linear_qkv", 512)
    save(good | stored, folder)
    paths = (f"paths.base={base}", f"paths.output={tmp_path}/output", f"paths.export={tmp_path}/export")
    result = ranks("export", configure("glm4-moe", *paths))
    assert result.code == 2
    layer = next(iter(stored)).partition(".adapter.")[0]
    assert f"belong to no adapter of {configure('glm4-moe').paths.model}: {layer}" in result.output
    assert not (tmp_path / "export").exists()


def test_adapters_of_some_experts_of_a_stack_are_named(configure, ranks, exported, tmp_path):
    layer = "decoder.layers.0.mlp.experts.linear_fc2.adapter"
    shapes = {"linear_in": (8, 128), "linear_out": (128, 8)}
    stored = {f"{layer}.{part}.weight{n}": torch.ones(shape) for part, shape in shapes.items() for n in (0, 3)}
    save(stored, tmp_path / "output/checkpoints/iter_0000001")
    base = exported.bases["gpt-oss"].paths.base
    paths = (f"paths.base={base}", f"paths.output={tmp_path}/output", f"paths.export={tmp_path}/export")
    result = ranks("export", configure("gpt-oss", *paths))
    assert result.code == 2
    assert "adapters of model.layers.0.mlp.experts.down_proj for some but not all experts" in result.output


def test_a_release_that_changed_after_the_conversion_is_noticed(configure, ranks, exported, tmp_path):
    run = exported.runs["lora"]
    shutil.copytree(run.paths.model, tmp_path / "model")
    file = next((tmp_path / "model").glob("model-00001-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    paths = (f"paths.model={tmp_path}/model", f"paths.base={run.paths.base}", f"paths.output={run.paths.output}")
    result = ranks("export", configure("glm4-moe-mtp", *paths, f"paths.export={tmp_path}/export"))
    assert result.code == 2
    assert f"{tmp_path}/model: 1 tensors are not those that the base was converted from: model.layers." in result.output
    assert "put the released files back, or convert and train again" in result.output
    assert not (tmp_path / "export").exists()


def test_an_adapter_on_a_merged_one_does_not_name_the_release_as_its_base():
    run = load("tiny", ["model.merge_adapter=org/first"])
    assert export.adapted_model(run) == "tiny://glm4-moe with org/first merged"
    assert export.adapted_model(load("tiny")) == "tiny://glm4-moe"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("export.checkpoint=5", "export.checkpoint: 5 is not complete in"),
        ("paths.output=nowhere", "no complete checkpoint; python -m trainer.train makes one"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_asked_for(override, said, configure, ranks, exported, work, tmp_path):
    run = exported.runs["lora"]
    paths = [f"paths.base={run.paths.base}", f"paths.output={run.paths.output}", f"paths.export={tmp_path}/export"]
    paths = [path for path in paths if path.partition("=")[0] != override.partition("=")[0]]
    override = override.replace("nowhere", f"{tmp_path}/nowhere")
    result = ranks("export", configure("glm4-moe-mtp", *paths, override))
    assert result.code == 2
    assert said in result.output


def test_dora_that_peft_cannot_express_is_refused_before_anything_is_written(configure, ranks, exported, tmp_path):
    folder = tmp_path / "output/checkpoints/iter_0000001"
    layer = "decoder.layers.0.mlp.linear_fc2"
    stored = adapter_of(layer, 128, 256) | {f"{layer}.adapter.weight_magnitude": torch.ones(128)}
    save(stored, folder)
    base = exported.bases["glm4-moe"].paths.base
    paths = (f"paths.base={base}", f"paths.output={tmp_path}/output", f"paths.export={tmp_path}/export")
    result = ranks("export", configure("glm4-moe", *paths))
    assert result.code == 2
    assert "export.formats: PEFT has no DoRA for model.layers.0.mlp.down_proj.weight" in result.output
    done(ranks("export", configure("glm4-moe", *paths, "export.formats=[merged]")))
