"""Additional losses of a training: balance of experts, the routers' z loss, and multi-token prediction (MTP).

    identity(run, config)       entries of these losses in the identity of a training, by section
    is_balanced(run, config)    whether a loss trains the routers, or training adjusts the experts' bias
    looks_ahead(run, config)    whether MTP layers are trained

`config` is the released model's config.json. Each loss is computed over rows of the data, or over their learned tokens
(trainer/megatron/routers/balance.py, trainer/patches/gradients/mtp_loss.py), so it does not depend on
train.micro_batch, the layout or packing. Earlier trainings computed the losses over micro batches and padding, and have
other fingerprints.
"""

from typing import Any

from conf import families
from conf.families.parts.family import Balance
from conf.rules import objectives
from conf.schema.run import Run

BALANCE = {"moe": {"balance_over": "rows"}}
AHEAD = {"model": {"mtp_loss_over": "learned tokens"}}


def identity(run: Run, config: dict[str, Any]) -> dict[str, dict[str, str]]:
    return (BALANCE if is_balanced(run, config) else {}) | (AHEAD if looks_ahead(run, config) else {})


def looks_ahead(run: Run, config: dict[str, Any]) -> bool:
    learned = run.model.mtp_loss_scale > 0 and objectives.of(run).next_token
    return run.model.mtp and learned and bool(config.get(families.of(config).key("num_nextn_predict_layers")))


def is_balanced(run: Run, config: dict[str, Any]) -> bool:
    balance, moe = families.of(config).balance, run.moe
    if balance is None:
        return False
    moves_bias = balance.moves_bias and run.adapter.kind == "none" and not moe.freeze_router
    return bool(moe.z_loss_coeff) or moves_bias or bool(_weight(run, config, balance))


def _weight(run: Run, config: dict[str, Any], balance: Balance) -> float:
    moe = run.moe
    if moe.balance == "none" or (moe.balance == "model" and not (balance.always or balance.key)):
        return 0.0
    if moe.aux_loss_coeff is not None:
        return moe.aux_loss_coeff
    return 1.0 if balance.always else config.get(balance.key or "router_aux_loss_coef", 1.0)
