"""Gradients and losses of reinforcement learning are at every layout those of one process, padded or packed."""

import pytest

BOUND = 1e-4
BOTH = ("train.global_batch=8", "train.micro_batch=2", "moe.aux_loss_coeff=0", "optimizer.decay=constant")
PACKED = ("data.packed=true", "train.micro_batch=1")
SP = "layout.tp=2 layout.sp=true"
CASES = [
    pytest.param(loss, cut, settings, marks=() if (loss, cut, settings) in QUICK else pytest.mark.slow)
    for QUICK in [{("gspo", "layout.cp=2", PACKED)}]
    for loss in ("grpo", "gspo", "cispo")
    for cut in ("alone", "", SP, "layout.ep=2", "layout.cp=2", "layout.pp=2", "layout.pp=2 layout.vpp=2")
    for settings in ((), PACKED)
    if settings or cut != "alone"
]


@pytest.mark.parametrize("loss, cut, settings", CASES)
def test_gradients_and_losses_are_those_of_one_process(loss, cut, settings, compare):
    found = compare("glm4-moe", "none", cut, False, settings=settings, both=BOTH, policy=loss)
    assert found["over"] == [] and found["gradient"]["difference"] <= BOUND, found["gradient"]
    assert max(found["loss"], found["loss_after"]) <= BOUND, found
    assert settings or found["same_routes"], found  # packed rows have less padding, which is routed as well
