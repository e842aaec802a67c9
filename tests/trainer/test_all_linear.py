"""adapter.targets all-linear: in each family every matrix but those of embeddings, heads and routers has an adapter."""

import re
from pathlib import Path

import pytest
from safetensors import safe_open

from trainer.rehearsal import tiny_models

NEITHER = ("embed_tokens", "embeddings", "lm_head", "wte", "wpe")  # and what chooses experts
NEITHER += ("mixer.gate", "mlp.gate", "block_sparse_moe.gate", "mlp.router", "shared_expert_gate", "conv1d")
EXPERT = re.compile(r"(?P<layer>model\.(language_model\.)?layers\.\d+)\.(?P<mlp>mlp|block_sparse_moe|mixer)\.experts\.")
PLUS = ["adapter.rank=4", "adapter.alpha=8", "adapter.rslora=true", "adapter.b_lr_ratio=16", "train.steps=2"]


def matrices(folder: Path, layers: int) -> set[str]:
    """Modules of a release that have a matrix, without the layers of MTP, which PEFT does not know."""
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name for name in tensors.keys() if len(tensors.get_slice(name).get_shape()) > 1}  # noqa: SIM118
    found = {name for name in found if not re.match(rf"model\.layers\.{layers}\.", name)}
    return {name.removesuffix(".weight").replace("backbone.", "model.") for name in found}


def adapted(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_each_matrix_has_an_adapter_of_rslora_and_lora_plus(kind, configure, ranks, base, work):
    base(kind)
    places = {"output": work / f"all-{kind}", "export": work / f"all-{kind}-export"}
    places["parity"] = places["output"] / "parity.json"
    given = [f"paths.{key}={place}" for key, place in places.items()]
    run = configure(kind, *PLUS, *given, "adapter.targets=all-linear", "export.formats=[adapter]")
    for command in ("train", "export"):
        result = ranks(command, run)
        assert result.code == 0, result.output[-3000:]
    config = tiny_models.KINDS[kind]
    found = adapted(places["export"] / "adapter" / "adapter_model.safetensors")
    left = matrices(Path(run.paths.model), config.get("num_hidden_layers", config.get("n_layer"))) - found
    left = {name for name in left if not name.endswith(NEITHER)}
    experts = {
        name: f"{match['layer']}.{match['mlp'].replace('block_sparse_moe', 'mlp')}.experts"
        for name in left
        if (match := EXPERT.match(name))
    }
    assert left == experts.keys()
    for module in set(experts.values()):  # PEFT has those of all experts in one, of what goes in and of what comes out
        assert {module, f"{module}.base_layer"} <= found
