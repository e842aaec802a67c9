"""Every gradient of a first step with B drawn is the same at every layout as on one process: gradients_of_run.py.

The CPU's stand-in for Transformer Engine drops what comes back through a norm's output that was returned gathered, as
the real one does. benchmarks/gpu/gradients.py asks the same of the real one.
"""

import json
from pathlib import Path

import pytest

from tests.support.ranks.gradients_of_run import make_data

BOUND = 1e-4
DOWN = "linear_q_down_proj,linear_kv_down_proj"
UP = "linear_q_up_proj,linear_kv_up_proj,linear_proj"
TARGETS = {
    ("llama", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("glm4-moe", "lora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("deepseek-v3", "lora"): f"{DOWN},{UP},linear_fc1,linear_fc2",
    ("llama", "dora"): "linear_qkv,linear_proj,linear_fc1,linear_fc2",
    ("glm4-moe", "dora"): "linear_qkv,linear_proj",
    ("deepseek-v3", "dora"): UP,
}
SP = "layout.tp=2 layout.sp=true"
MOE = (SP, f"{SP} layout.ep=2", f"{SP} layout.etp=2", "layout.cp=2", "layout.pp=2 layout.vpp=2", "")
DENSE = (SP, "layout.tp=2", "layout.cp=2", "layout.pp=2 layout.vpp=2", "")
QUICK = {("llama", "lora", SP, False), ("llama", "dora", "layout.tp=2", False), ("deepseek-v3", "lora", SP, True)}
CASES = [
    pytest.param(model, kind, cut, packed, marks=() if (model, kind, cut, packed) in QUICK else pytest.mark.slow)
    for model, cuts in (("llama", DENSE), ("glm4-moe", MOE), ("deepseek-v3", MOE))
    for kind in ("lora", "dora", "none")
    for cut in cuts  # "": two copies
    for packed in (False, True)
]


@pytest.fixture(scope="module")
def compare(configure, base, ranks, work):
    """compare(model, kind, cut, packed, targets="", before=False) -> what compare() of gradients_of_run.py found."""
    make_data(work / "rows")

    def compare(model: str, kind: str, cut: str, packed: bool, targets: str = "", before: bool = False) -> dict:
        base(model)
        name = "-".join([model, kind, *(["packed"] if packed else []), *targets.split(",")])
        settings = [f"paths.data={work}/rows", "data.seq_length=128", f"data.packed={str(packed).lower()}"]
        settings += ["train.steps=3", "train.global_batch=2", "optimizer.lr=1e-3", f"adapter.kind={kind}"]
        settings += [f"adapter.targets=[{targets or TARGETS[model, kind]}]"] if kind != "none" else []
        reference = work / f"{name}.pt"
        if not reference.exists():
            ask(configure(model, *settings, f"paths.output={work}/{name}"), reference, False)
        where = f"{name}-{cut}-{before}".replace(" ", "-").replace("layout.", "")
        cuts = ["layout.gpus_per_node=2", *cut.split(), f"paths.output={work}/{where}"]
        return ask(configure(model, *settings, *cuts), reference, before)

    def ask(run, reference: Path, before: bool) -> dict:
        folder = Path(run.paths.output)
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps({"reference": str(reference), "before": before}))
        result = ranks("gradients_of_run", run)
        assert result.code == 0, result.output[-4000:]
        return json.loads((folder / "answer.json").read_text())

    return compare


@pytest.mark.parametrize("model, kind, cut, packed", CASES)
def test_every_gradient_and_loss_is_that_of_one_process(model, kind, cut, packed, compare):
    found = compare(model, kind, cut, packed)
    assert found["over"] == [] and found["gradient"]["difference"] <= BOUND, found["gradient"]
    assert found["loss"] <= BOUND and found["same_routes"] and found["moved"] <= 4, found


def test_what_a_gathered_norm_s_output_loses_is_seen_in_every_layer_below_the_last(compare):
    found = compare("llama", "lora", SP, False, before=True)
    layers = {name.rpartition("@")[2] for name in found["over"]}
    assert layers >= {"0", "1", "2"} and found["gradient"]["difference"] > 0.1, found


@pytest.mark.slow
def test_tokens_that_an_adapter_of_a_whole_layer_mixes_are_seen(compare):
    found = compare("deepseek-v3", "lora", SP, False, targets=DOWN, before=True)
    assert found["gradient"]["difference"] > 0.1 and max(found["loss"], found["loss_after"]) > BOUND
    assert compare("deepseek-v3", "lora", SP, False, targets=DOWN)["over"] == []
