"""A base whose layers compute another function than transformers' is named before it is there."""

import json
import shutil

import pytest

from conf import families

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
    ("nemotron-h-mtp", "swapped_norms_of_two_blocks", "mtp.layers.0 (multi-token prediction)"),
    ("qwen3-moe", "unnormalised_experts", "model.layers.0 (moe)"),
    ("gpt2", "swapped_norms_of_gpt2", "transformer.h.0 (dense)"),
    ("gpt2", "turned_matrix_of_gpt2", "transformer.h.0 (dense)"),
]
SOUND = {
    "llama": ["model.layers.0", "the logits"],
    "glm4-moe-mtp": ["model.layers.0", "model.layers.1", "model.layers.4", "the logits"],
    "qwen3-moe": ["model.layers.0", "the logits"],
    "qwen3-next-mtp": [*(f"model.layers.{layer}" for layer in range(4)), "mtp.layers.0", "the logits"],
    "nemotron-h-mtp": [*(f"backbone.layers.{layer}" for layer in range(4)), "mtp.layers.0", "the logits"],
    "gpt2": ["transformer.h.0", "the logits"],
}
# Keys of config.json that Bridge reads, or drops, which conf/rules/function.py refuses beforehand.
TRAPS = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}, False),
    "window": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, True),
    "linear of qwen3-moe": (
        "qwen3-moe",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}},
        True,
    ),
    "norm_topk_prob": ("glm4-moe-mtp", {"norm_topk_prob": False}, True),
}


MEMORY = ["little_memory", "no_memory"]
MANY = (
    "qwen3-moe-64"  # as many experts as a head has numbers, like Qwen3.5-35B: vectors of a head were cut like experts
)
QUICK = (MANY, "glm4-moe-mtp", "glm4-moe-mtp permuted_experts", "glm4-moe-mtp swapped_norms_of_mtp")
QUICK += ("gpt2 swapped_norms_of_gpt2",)


def case(name: str):
    """A case by its name. All are asked of one process; most are for the slow run."""
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name)


@pytest.fixture(scope="module")
def answers(configure, base, ranks, work, request):
    """By name of a case that is asked for, the differences or the fault's line."""
    mine = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    wanted = {item.callspec.params["name"] for item in mine}
    faults = {f"{kind} {fault}": (kind, fault) for kind, fault, _ in FAULTS}
    faults |= {kind: (kind, None) for kind in SOUND} | {fault: ("glm4-moe-mtp", fault) for fault in MEMORY}
    faults[MANY] = MANY, "few_experts"
    cases, names = [], []
    for name, (kind, fault) in faults.items():
        if name in wanted:
            tiny = families.tiny()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    families, "tiny", lambda tiny=tiny: tiny | {MANY: tiny["qwen3-moe"] | {"num_experts": 64}}
                )
                base(kind)
            names.append(name)
            cases.append({"run": configure(kind).model_dump(mode="json"), "fault": fault})
    for name, (kind, change, _) in TRAPS.items():
        if name in wanted:
            base(kind)
            folder = work / name
            shutil.copytree(work / kind, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | change))
            names.append(name)
            run = configure(kind, f"paths.model={folder}")
            cases.append({"run": run.model_dump(mode="json"), "fault": None})
    folder = work / "compared"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(cases))
    result = ranks("compared_layers", configure("llama", f"paths.output={folder}"))
    assert result.code == 0, result.output[-4000:]
    return dict(zip([*names, "compiler"], json.loads((folder / "answer.json").read_text()), strict=True))


@pytest.mark.parametrize("name", [*map(case, SOUND)])
def test_one_layer_of_each_kind_agrees(name, answers):
    found = answers[name]
    assert list(found) == SOUND[name], found
    assert max(found.values()) < 1e-5


def test_torch_s_compiler_is_not_imported_for_it(answers):
    """It takes a second."""
    assert answers["compiler"] is False


@pytest.mark.parametrize("name", [case(f"{kind} {fault}") for kind, fault, _ in FAULTS])
def test_a_layer_that_computes_another_function_is_named(name, answers):
    (layer,) = [layer for kind, fault, layer in FAULTS if f"{kind} {fault}" == name]
    found = answers[name]
    assert isinstance(found, str) and layer in found and "\n" not in found, found


@pytest.mark.parametrize("name", [*map(case, TRAPS)])
def test_a_key_that_bridge_drops_is_seen_without_the_table_of_keys(name, answers):
    found = answers[name]
    assert isinstance(found, str) == TRAPS[name][2], found


@pytest.mark.parametrize("name", [case(MEMORY[0]), case(MANY)])
def test_fewer_experts_are_compared_where_memory_is_short(name, answers):
    assert max(answers[name].values()) < 1e-5


@pytest.mark.parametrize("name", [case(MEMORY[1])])
def test_a_host_without_the_memory_says_how_to_do_without(name, answers):
    assert "are free. model.compare=false" in answers[name]
