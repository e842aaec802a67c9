"""Megatron-core without trainer/patches, and patches at versions that are not theirs. See conftest.unpatched.

main(run) calls the function that request.json in run.paths.output names, and leaves its result in answer.json.
"""

import importlib.metadata
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from conf.schema.run import Run
from contract.faults import Fault


def main(run: Run) -> None:
    folder = Path(run.paths.output)
    request = json.loads((folder / "request.json").read_text())
    answer = globals()[request.pop("function")](**request)
    (folder / "answer.json").write_text(json.dumps(answer))


def refused(functions: dict[str, list[str]]) -> dict[str, str]:
    """The fault of each function, module by module, where every package has another version."""
    patches = {name: import_module(f"trainer.patches.{name.replace('/', '.')}") for name in functions}
    importlib.metadata.version = lambda package: "99.1"
    found = {}
    for name, module in patches.items():
        for function in functions[name]:
            try:
                getattr(module, function)(*([] if function.startswith("install") else [[]]))
            except Fault as fault:
                found[f"{name}.{function}"] = str(fault)
    return found


def chain() -> str:
    """Error of two optimizers that are given the state of four; empty where there is none."""
    from megatron.core.optimizer import ChainedOptimizer

    two = SimpleNamespace(chained_optimizers=[None, None])
    try:
        ChainedOptimizer.load_state_dict(two, dict.fromkeys(range(4)))
    except RuntimeError as error:
        return str(error)
    return ""


def offloaded() -> int:
    """The step that a part is at before its next, resumed at step 3 and at 5 by now."""
    import torch
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    weight = torch.zeros(1)
    part = SimpleNamespace(param_groups=[{"params": [weight], "step": 5}])
    resumed = SimpleNamespace(
        param_groups=[{"params": [weight], "step": 3}], sub_optimizers=[part], param_to_inner_param={weight: weight}
    )
    HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers(resumed)
    return part.param_groups[0]["step"]


def kept(patched: bool) -> list[str]:
    """What each dispatcher, or its manager, still has of a graph when its tokens are back."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    from trainer.patches import kept_routes

    if patched:
        kept_routes.install()
        kept_routes.install()  # which changes nothing
    weights = torch.ones(4, 2, requires_grad=True) * 2
    found = []
    for name in kept_routes.DISPATCHERS:
        dispatcher = object.__new__(getattr(token_dispatcher, name))
        manager = SimpleNamespace(
            token_probs=weights * 3, handle=1, get_restored_hidden_states_by_experts=lambda hidden: hidden
        )
        vars(dispatcher).update(
            probs=weights,
            local_probs=weights,
            routing_map=torch.ones(4, 2, dtype=torch.bool),
            reversed_local_input_permutation_mapping=torch.arange(4).repeat(2),
            hidden_shape_before_permute=torch.Size((4, 8)),
            hidden_shape=torch.Size((4, 1, 8)),
            config=SimpleNamespace(moe_permute_fusion=False),
            drop_and_pad=False,
            shared_experts=None,
            _comm_manager=manager,
        )
        tokens = torch.ones(8 if "AlltoAll" in name else 4, 8)
        assert dispatcher.combine_postprocess(tokens).shape == (4, 1, 8)
        kept = [holder.__dict__ for holder in (dispatcher, manager)]
        graphs = [key for each in kept for key, value in each.items() if getattr(value, "grad_fn", None) is not None]
        found += [f"{name}.{key}" for key in graphs]
        assert dispatcher.routing_map is not None and manager.handle == 1  # what has no graph stays
    return found
