"""A base whose layers compute another function than transformers' is named before it is there."""

import json
import shutil

import pytest

# Of a kind of model and faults planted in either side: the layer that is named.
FAULTS = [
    ("llama", "swapped_keys_and_values", "model.layers.0 (dense)"),
    ("llama", "swapped_norms", "model.layers.0 (dense)"),
    ("llama", "another_theta", "model.layers.0 (dense)"),
    ("llama", "another_activation", "model.layers.0 (dense)"),
    ("llama", "another_epsilon", "model.layers.0 (dense)"),
    ("llama", "rotated_by_pairs", "model.layers.0 (dense)"),
    ("glm4-moe-mtp", "half_of_a_head_rotated", "model.layers.0 (dense)"),
    ("glm4-moe-mtp", "no_norms_of_queries", "model.layers.0 (dense)"),
    ("glm4-moe-mtp", "permuted_experts", "model.layers.1 (moe)"),
    ("glm4-moe-mtp", "swapped_gate_and_up", "model.layers.1 (moe)"),
    ("glm4-moe-mtp", "no_router_bias", "model.layers.1 (moe)"),
    ("glm4-moe-mtp", "no_routing_scale", "model.layers.1 (moe)"),
    ("glm4-moe-mtp", "swapped_norms_of_mtp", "model.layers.4 (multi-token prediction)"),
    ("qwen3-moe", "unnormalised_experts", "model.layers.0 (moe)"),
]
SOUND = {
    "llama": ["model.layers.0", "the logits"],
    "glm4-moe-mtp": ["model.layers.0", "model.layers.1", "model.layers.4", "the logits"],
    "qwen3-moe": ["model.layers.0", "the logits"],
}
# Keys of config.json that Bridge drops or reads otherwise; conf/rules/function.py refuses them beforehand.
TRAPS = [
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, False),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, True),
    ("qwen3-moe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, True),
    ("glm4-moe-mtp", {"norm_topk_prob": False}, True),
]


@pytest.fixture(scope="module")
def answers(configure, base, ranks, work):
    """By case, the differences or the fault's line; all are asked of one process."""
    cases, asked = [], {}

    def ask(name: str, run, fault: str | None) -> None:
        asked[name] = len(cases)
        cases.append({"run": run.model_dump(mode="json"), "fault": fault})

    for kind in SOUND:
        base(kind)
        ask(kind, configure(kind), None)
    for kind, fault, _ in FAULTS:
        ask(f"{kind} {fault}", configure(kind), fault)
    for fault in ("little_memory", "no_memory"):
        ask(fault, configure("glm4-moe-mtp"), fault)
    for number, (kind, change, _) in enumerate(TRAPS):
        folder = work / f"trap-{number}"
        shutil.copytree(work / kind, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        ask(f"trap {number}", configure(kind, f"paths.model={folder}"), None)
    folder = work / "compared"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(cases))
    result = ranks("compared_layers", configure("llama", f"paths.output={folder}"))
    assert result.code == 0, result.output[-4000:]
    found = json.loads((folder / "answer.json").read_text())
    return {name: found[number] for name, number in asked.items()}


@pytest.mark.parametrize("kind", SOUND)
def test_one_layer_of_each_kind_agrees(kind, answers):
    found = answers[kind]
    assert list(found) == SOUND[kind], found
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize(("kind", "fault", "named"), FAULTS, ids=[fault for _, fault, _ in FAULTS])
def test_a_layer_that_computes_another_function_is_named(kind, fault, named, answers):
    found = answers[f"{kind} {fault}"]
    assert isinstance(found, str) and named in found and "\n" not in found, found


@pytest.mark.parametrize("number", range(len(TRAPS)))
def test_a_key_that_bridge_drops_is_seen_without_the_table_of_keys(number, answers):
    found = answers[f"trap {number}"]
    assert isinstance(found, str) == TRAPS[number][2], found


def test_fewer_experts_are_compared_where_memory_is_short(answers):
    assert max(answers["little_memory"].values()) < 1e-5


def test_a_host_without_the_memory_says_how_to_do_without(answers):
    assert "are free. model.compare=false" in answers["no_memory"]
