"""Our PEFT file of experts, split by vLLM's own code as when it serves it: merged minus released, expert by expert.

vLLM has two layouts for adapters of experts, and has changed what it takes for which: a file that it splits otherwise
would be served wrongly, and only a GPU would show it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from types import SimpleNamespace
from safetensors.torch import save_file
from trainer.patches import vllm_cpu
with vllm_cpu.hidden():
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
folder, rank, of, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
leaves = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"}
helper = PEFTHelper.from_local_dir(folder, None)
lora = LoRAModel.from_local_checkpoint(folder, leaves, helper, lora_model_id=1, device="cpu")
for weights in lora.loras.values():
    weights.optimize()
manager = object.__new__(LoRAModelManager)
manager.model = SimpleNamespace(config=SimpleNamespace(architectures=["Glm4MoeForCausalLM"]))
manager._get_lora_layer_weights = lambda model, name: model.get_lora(name)
module = SimpleNamespace(local_num_experts=8 // of, global_num_experts=8, ep_rank=rank)
found = {}
for layer in [name for name in lora.loras if name.endswith(".experts")]:
    manager._convert_3d_to_2d_moe_lora(lora, module, layer)
    weights = lora.loras[layer]
    for leaf, a, b in zip(("gate", "down", "up"), weights.lora_a, weights.lora_b, strict=True):
        for expert in range(8 // of):
            found[f"{layer}:{leaf}:{expert}.lora_A"] = a[expert].contiguous().clone()
            found[f"{layer}:{leaf}:{expert}.lora_B"] = b[expert].contiguous().clone()
save_file(found, out)
"""


@pytest.fixture(scope="module")
def exported(configure, ranks, base, work):
    base("glm4-moe")
    output = work / "split"
    paths = (f"paths.output={output}", f"paths.export={output}/export", f"paths.parity={output}/parity.json")
    run = configure("glm4-moe", *paths)
    for command in ("train", "export"):
        result = ranks(command, run)
        assert result.code == 0, result.output
    return run


@pytest.fixture
def split(exported, tmp_path):
    """split(ep_rank, of) -> A and B by layer, matrix and local expert, as vLLM makes them for one of so many ranks."""

    def split(rank: int, of: int) -> dict[str, torch.Tensor]:
        out = tmp_path / "split.safetensors"
        command = [sys.executable, "-c", PROGRAM, f"{exported.paths.export}/adapter", str(rank), str(of), str(out)]
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return load_file(out)

    return split


@pytest.mark.parametrize(("rank", "of"), [(0, 1), (1, 2)])
def test_vllm_splits_our_file_into_what_was_merged(rank, of, split, exported):
    merged, released = _weights(Path(exported.paths.export) / "merged"), _weights(Path(exported.paths.model))
    found, largest = split(rank, of), 0.0
    assert len(found) == 3 * 3 * (8 // of) * 2
    for name in {key.rpartition(".lora_")[0] for key in found}:
        layer, leaf, expert = name.rsplit(":", 2)
        weight = f"{layer}.{int(expert) + rank * (8 // of)}.{leaf}_proj.weight"
        delta = merged[weight] - released[weight]
        assert torch.allclose(found[f"{name}.lora_B"] @ found[f"{name}.lora_A"], delta, atol=1e-6, rtol=0), weight
        largest = max(largest, delta.abs().max().item())
    assert largest > 1e-3


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    every = {}
    for file in folder.glob("*.safetensors"):
        every |= load_file(file)
    return every
