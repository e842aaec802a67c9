"""Layers compared with transformers', with faults planted. See tests/trainer/weights/test_same_function.py.

main(run) reads request.json in run.paths.output, a list of cases, and leaves each one's answer in answer.json: the
differences, or the line of a fault. A case has run and fault, the name of a function here. The last answer is whether
torch has imported its compiler.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.schema.run import Run

Patch = pytest.MonkeyPatch


def main(run: Run) -> None:
    import torch

    from contract.faults import Fault
    from trainer.weights.conversion import same_function

    torch.distributed.init_process_group("gloo")
    folder, answers = Path(run.paths.output), []
    for case in json.loads((folder / "request.json").read_text()):
        asked = Run.model_validate_json(json.dumps(case["run"]))
        with Patch.context() as patch:
            if case["fault"]:
                globals()[case["fault"]](patch)
            try:
                answers.append(same_function.compare(asked, Path(asked.paths.base) / "iter_0000000"))
            except Fault as fault:
                answers.append(str(fault))
    compiler = "torch._dynamo.convert_frame" in sys.modules
    (folder / "answer.json").write_text(json.dumps([*answers, compiler]))
    torch.distributed.destroy_process_group()


def _released(patch: Patch, change: Callable[[dict], None]) -> None:
    """Have transformers be given other tensors than the base was made of."""
    from trainer.weights.conversion import same_function
    from trainer.weights.released import read

    def changed(folder: Path):
        model = read(folder)
        change(model.tensors)
        return model

    own = {name: getattr(same_function.released, name) for name in dir(same_function.released)}
    patch.setattr(same_function, "released", SimpleNamespace(**own | {"read": changed}))


def _swap(patch: Patch, layer: str, one: str, other: str) -> None:
    def swap(tensors: dict) -> None:
        pairs = [name for name in tensors if name.startswith(f"{layer}.{one}")]
        assert pairs
        for name in pairs:
            twin = name.replace(one, other)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    _released(patch, swap)


def _provided(patch: Patch, **keys) -> None:
    """Have Megatron build another model, as where Bridge forgets a key."""
    from trainer.weights.conversion import same_function

    make = same_function.make_provider

    def changed(run, bridge):
        provider = make(run, bridge)
        for key, value in keys.items():
            assert hasattr(provider, key), key
            setattr(provider, key, value)
        return provider

    patch.setattr(same_function, "make_provider", changed)


def swapped_queries_and_keys(patch: Patch) -> None:
    _swap(patch, "model.layers.0", "self_attn.q_proj", "self_attn.k_proj")


def swapped_keys_and_values(patch: Patch) -> None:
    _swap(patch, "model.layers.0", "self_attn.k_proj", "self_attn.v_proj")


def swapped_norms(patch: Patch) -> None:
    _swap(patch, "model.layers.0", "input_layernorm", "post_attention_layernorm")


def swapped_norms_of_gpt2(patch: Patch) -> None:
    _swap(patch, "transformer.h.0", "ln_1", "ln_2")


def turned_matrix_of_gpt2(patch: Patch) -> None:
    """Have transformers be given the matrix that has as many rows as columns as it is not stored."""
    from trainer.weights.conversion import same_function

    read = same_function.released_tensors.read

    def turned(model, name: str):
        tensor = read(model, name)
        return tensor.t().contiguous() if name == "transformer.h.0.attn.c_proj.weight" else tensor

    patch.setattr(same_function, "released_tensors", SimpleNamespace(read=turned))


def swapped_gate_and_up(patch: Patch) -> None:
    _swap(patch, "model.layers.1", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")


def permuted_experts(patch: Patch) -> None:
    _swap(patch, "model.layers.1", "mlp.experts.2.", "mlp.experts.5.")


def swapped_norms_of_mtp(patch: Patch) -> None:
    _swap(patch, "model.layers.4", "enorm", "hnorm")


def swapped_norms_of_two_blocks(patch: Patch) -> None:
    _swap(patch, "mtp.layers", "0.norm", "1.norm")


def another_theta(patch: Patch) -> None:
    _provided(patch, rotary_base=1e4)


def another_activation(patch: Patch) -> None:
    import torch

    _provided(patch, activation_func=torch.nn.functional.gelu)


def unnormalised_experts(patch: Patch) -> None:
    _provided(patch, moe_router_pre_softmax=True)


def no_router_bias(patch: Patch) -> None:
    _provided(patch, moe_router_enable_expert_bias=False)


def no_routing_scale(patch: Patch) -> None:
    _provided(patch, moe_router_topk_scaling_factor=1.0)


def no_norms_of_queries(patch: Patch) -> None:
    _provided(patch, qk_layernorm=False)


def another_epsilon(patch: Patch) -> None:
    _provided(patch, layernorm_epsilon=1e-3)


def rotated_by_pairs(patch: Patch) -> None:
    _provided(patch, rotary_interleaved=True)


def half_of_a_head_rotated(patch: Patch) -> None:
    _provided(patch, rotary_percent=0.25)


def little_memory(patch: Patch) -> None:
    from trainer.weights.conversion import same_function

    patch.setattr(same_function, "available", lambda: 3_500_000)


def few_experts(patch: Patch) -> None:
    from trainer.weights.conversion import same_function

    patch.setattr(same_function, "PLENTY", 0)


def no_memory(patch: Patch) -> None:
    from trainer.weights.conversion import same_function

    patch.setattr(same_function, "available", lambda: 100_000)
