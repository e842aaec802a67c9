"""Print, as JSON, how Megatron trains the routers of a run. For test_balance.py."""

import json

from conf.schema.run import Run
from trainer.startup import device


def main(run: Run) -> None:
    device.start()
    from trainer.megatron.model import make_provider, open_bridge

    made = make_provider(run, open_bridge(run))
    moves_bias = made.moe_router_enable_expert_bias and made.moe_router_bias_update_rate > 0
    balances = "aux_loss" in made.moe_router_load_balancing_type and made.moe_aux_loss_coeff > 0
    print(json.dumps({"trained": bool(moves_bias or balances or made.moe_z_loss_coeff)}))
