"""Every gradient of a first step with B drawn is the same at every layout as on one process: gradients_of_run.py.

tests/trainer/patches/test_gradients_unpatched.py leaves repairs out; benchmarks/gpu/gradients.py asks the same on GPUs.
LoRA of a dense model is asked in each quick run by tests/trainer/megatron/test_lean_adapters.py.
"""

import pytest

BOUND = 1e-4
SP = "layout.tp=2 layout.sp=true"
MOE = (SP, f"{SP} layout.ep=2", f"{SP} layout.etp=2", "layout.cp=2", "layout.pp=2 layout.vpp=2", "")
DENSE = (SP, "layout.tp=2", "layout.cp=2", "layout.pp=2 layout.vpp=2", "")
QUICK = {("llama", "dora", "layout.tp=2", False), ("deepseek-v3", "lora", SP, True)}
CASES = [
    pytest.param(model, kind, cut, packed, marks=() if (model, kind, cut, packed) in QUICK else pytest.mark.slow)
    for model, cuts in (
        *(("llama", DENSE), ("qwen3", DENSE), ("glm4-moe", MOE), ("deepseek-v3", MOE)),
        ("gpt-oss", tuple(cut for cut in MOE if "etp" not in cut and "cp" not in cut)),
    )
    for kind in ("lora", "dora", "none")
    for cut in cuts  # "": two copies
    for packed in (False, True)
    if model != "gpt-oss" or kind != "dora"  # which its experts do not take
    if model != "qwen3" or kind == "none"  # for its norms and its one vocabulary, which adapters leave alone
]


@pytest.mark.parametrize("model, kind, cut, packed", CASES)
def test_every_gradient_and_loss_is_that_of_one_process(model, kind, cut, packed, compare):
    found = compare(model, kind, cut, packed)
    assert found["over"] == [] and found["gradient"]["difference"] <= BOUND, found["gradient"]
    assert found["loss"] <= BOUND and found["same_routes"] and found["moved"] <= 4, found


@pytest.mark.slow
@pytest.mark.parametrize("model, cut", [("llama", "alone"), ("glm4-moe", "layout.pp=2")])
def test_layers_that_are_recomputed_and_others_have_the_same_gradients(model, cut, compare):
    settings = ("train.recompute=full", "train.recompute_first=1")
    assert compare(model, "lora", cut, False, settings=settings)["over"] == []
