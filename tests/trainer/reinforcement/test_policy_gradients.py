"""Gradients and losses of reinforcement learning are at every layout those of one process, padded or packed."""

import pytest
import torch

BOUND = 1e-4
BOTH = ("train.global_batch=8", "train.micro_batch=2", "moe.aux_loss_coeff=0", "optimizer.decay=constant")
PACKED = ("data.packed=true",)
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


MOE = "train.recompute=selective", "train.recompute_modules=[moe]"
FULL = ("train.recompute=full",)
REPLAYED = [
    ("", ()),
    (SP, ()),
    (SP, PACKED),
    ("layout.ep=2", ()),
    ("layout.cp=2", ()),
    ("layout.cp=2", PACKED),
    ("layout.pp=2", PACKED),
    ("layout.pp=2", FULL),
    ("layout.pp=2 layout.vpp=2", FULL),
    ("layout.pp=2 layout.vpp=2", (*MOE, *PACKED)),
    ("alone", FULL),
]
REPLAYED_QUICK = [("layout.cp=2", PACKED), ("layout.pp=2 layout.vpp=2", FULL)]


@pytest.mark.parametrize(
    "cut, settings",
    [pytest.param(*case, marks=() if case in REPLAYED_QUICK else pytest.mark.slow) for case in REPLAYED],
)
def test_with_experts_that_are_told_each_cut_computes_what_one_process_does(cut, settings, compare):
    found = compare("glm4-moe", "none", cut, False, settings=settings, both=BOTH, policy="grpo replayed")
    assert found["log_probs"] <= 1e-4, found
    assert found["over"] == [] and found["gradient"]["difference"] <= BOUND, found["gradient"]
    assert max(found["loss"], found["loss_after"]) <= BOUND, found


@pytest.mark.slow
def test_experts_that_are_told_are_others_than_a_router_would_take(compare, work):
    for policy in ("grpo", "grpo replayed"):
        compare("glm4-moe", "none", "", False, both=BOTH, policy=policy)
    own, told = (
        torch.load(work / f"glm4-moe-none--{'-'.join(BOTH)}-{policy}.pt") for policy in ("grpo", "grpo replayed")
    )
    apart = [
        abs(a - b) for number, values in told["said"].items() for a, b in zip(values, own["said"][number], strict=True)
    ]
    assert max(apart) > 100 * BOUND
