"""Compare one grouped product over all experts' adapters with Bridge's loop over them, in bf16 on a CPU."""

import json
from pathlib import Path

from conf.schema.run import Run

SIZES = [3, 8, 5, 16]


def main(run: Run) -> None:
    from tests.support.ranks import gradients_of_run

    gradients_of_run.start(run)
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig

    from trainer.megatron import frozen_experts, lean_adapters
    from trainer.patches.expert_adapters import ExpertAdapter

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = ModelParallelConfig(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True)
    adapter = ExpertAdapter(
        32, 48, 8, num_local_experts=len(SIZES), base_linear_name="mlp.experts.linear_fc1", activation="identity",
        row_init_method="xavier", alpha=16, model_parallel_config=config, params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(sum(SIZES), 32).bfloat16()
    output, weight = torch.randn(sum(SIZES), 48).bfloat16(), torch.randn(sum(SIZES), 48).bfloat16()
    found = []
    for grouped in (False, True):
        mine = x.clone().requires_grad_()
        own = output.clone().requires_grad_()
        part = lean_adapters.grouped(adapter, mine, frozen_experts.Counts(SIZES)) if grouped else adapter(mine, SIZES)
        # what the layer has made is no leaf of autograd's, so that it may be changed where it stands
        whole = lean_adapters._Add.apply(own * 1, part) if grouped else own + part
        (whole * weight).float().sum().backward()
        tensors = [whole, mine.grad, own.grad, adapter.linear_in.weight.grad, adapter.linear_out.weight.grad]
        found.append([one.detach().float().clone() for one in tensors])
        adapter.zero_grad()
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True)]
    fits = {"all": lean_adapters.is_grouped(adapter, x, SIZES), "one without": None}
    adapter._can_use_grouped_mm = lambda _: True  # as on a GPU
    fits |= {"gpu": lean_adapters.is_grouped(adapter, x, SIZES)}
    fits |= {"one without": lean_adapters.is_grouped(adapter, x, [0, 11, 5, 16])}
    (Path(run.paths.output) / "answer.json").write_text(json.dumps({"apart": apart, "fits": fits}))
