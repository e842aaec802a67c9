"""Two steps in, is anything being learned? If not, stop with the reason instead of burning a night of GPUs.

Frozen bases combined with recomputation have given finite losses and zero gradients in several frameworks. The gate
looks at what must follow from learning: a gradient norm above 0, and weights that differ from the start. It also writes
down what really runs, as Megatron's finished configuration has it: the layout, and what is recomputed.
"""

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import distributed

from conf.schema import Run
from trainer.console import say
from trainer.faults import Fault

STEPS = 2  # the first may have a learning rate of 0, where the warm-up begins


class Gates(Callback):
    def __init__(self, run: Run, metrics):
        self.run, self.metrics, self.steps = run, metrics, 0

    def on_train_start(self, context) -> None:
        self.before = _fingerprints(context)
        effective = _effective(context.state.cfg.model)
        self.metrics.write({"kind": "effective", "step": context.state.train_state.step, **effective})
        say("running with " + ", ".join(f"{key} {value}" for key, value in effective.items()))

    def on_train_step_end(self, context) -> None:
        self.steps += 1
        if self.steps != STEPS:
            return
        after = _fingerprints(context)
        still = sorted(name for name, value in after.items() if value == self.before[name])
        reasons = []
        if not (context.grad_norm and context.grad_norm > 0):
            reasons.append(f"the gradient norm is {context.grad_norm}")
        if still:
            shown = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
            reasons.append(f"{len(still)} of {len(after)} watched tensors have not changed ({shown})")
        del self.before
        _stop_together(reasons)


def _fingerprints(context) -> dict[str, float]:
    """Of each adapter's B outside the experts, of which some may get no token; of the master weights without one."""
    adapters = {
        name: parameter
        for stage, chunk in enumerate(unwrap_model(context.model))
        for name, parameter in ((f"stage {stage} {n}", p) for n, p in chunk.named_parameters())
        if name.endswith(".adapter.linear_out.weight") and ".experts." not in name
    }
    if not adapters:
        # bf16 weights may round two small steps away; the optimizer's fp32 copies, of which a rank has a shard, do not.
        shards = [p for group in context.optimizer.param_groups for p in group["params"] if p.numel()]
        adapters = {f"weights of rank {distributed.get_rank()}": torch.stack([p.double().sum() for p in shards])}
    return {name: float(p.detach().double().abs().sum()) for name, p in adapters.items()}


def _stop_together(reasons: list[str]) -> None:
    """Raise the same fault on all ranks if any has a reason, so that none is left waiting for the others."""
    everyone = [None] * distributed.get_world_size()
    rank, stage = distributed.get_rank(), parallel_state.get_pipeline_model_parallel_rank()
    distributed.all_gather_object(everyone, [f"rank {rank} (pipeline stage {stage}): {reason}" for reason in reasons])
    found = [reason for of_rank in everyone for reason in of_rank]
    if found:
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise Fault(f"nothing is learned after {STEPS} steps: {found[0]}{more}")


def _effective(model) -> dict:
    recompute = model.recompute_granularity or "none"
    if recompute == "selective":
        recompute += " " + "+".join(model.recompute_modules)
    if recompute == "full":
        recompute += f" {model.recompute_method} {model.recompute_num_layers}"
    return {
        "world": distributed.get_world_size(),
        "tp": model.tensor_model_parallel_size,
        "sp": model.sequence_parallel,
        "pp": model.pipeline_model_parallel_size,
        "vpp": model.virtual_pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": model.expert_model_parallel_size,
        "etp": model.expert_tensor_parallel_size,
        "recompute": recompute,
        "precision": str(model.params_dtype).removeprefix("torch."),
    }
