"""The learning check: whatever is trained and does not learn is named, of every kind, in every layer."""

import hashlib
import json
import re

import pytest

from trainer.training.learning_verdict import Observation, combined, judge, kind_of

LEARNS = Observation(gradient=True, changed=True, exact=None, rounded=False)
DETACHED = Observation(gradient=False, changed=False, exact=None, rounded=False)
DECAYS = Observation(gradient=False, changed=True, exact=None, rounded=False)
STANDS = Observation(gradient=True, changed=False, exact=None, rounded=False)
QKV, EXPERTS = "decoder.layers.{}.self_attention.linear_qkv.adapter", "decoder.layers.{}.mlp.experts.linear_fc1.adapter"
NOTHING = "got no gradient and have not changed"
LAYERS = {f"decoder.layers.{layer}.mlp": set(range(8)) for layer in (1, 2)}


def model(**changes: Observation) -> dict:
    """Two layers of eight experts, in which all learns but for the changes."""
    found = {(QKV.format(layer), None): LEARNS for layer in (1, 2)}
    found |= {(EXPERTS.format(layer), expert): LEARNS for layer in (1, 2) for expert in range(8)}
    return found | changes


def test_what_was_compared_is_counted_by_kind_and_layer():
    verdict = judge(model(), LAYERS)
    assert verdict.faults == []
    assert str(verdict) == "2 of attention, 16 of routed experts in 2 layers"


@pytest.mark.parametrize("seen", [DETACHED, DECAYS, STANDS])
def test_a_single_expert_that_had_something_to_learn_from_has_to_learn(seen):
    """Weight decay changes weights that no gradient reaches, and a gradient changes none that no optimizer has."""
    verdict = judge(model() | {(EXPERTS.format(2), 5): seen}, LAYERS)
    assert len(verdict.faults) == 1
    assert verdict.faults[0].startswith("1 of 16 tensors of routed experts ")
    assert f"{EXPERTS.format(2)}[5]" in verdict.faults[0]


def test_an_expert_without_a_token_that_bears_on_the_loss_may_stay_as_it_is():
    verdict = judge(model() | {(EXPERTS.format(2), 5): DETACHED}, LAYERS | {"decoder.layers.2.mlp": {0, 1}})
    assert verdict.faults == []
    assert str(verdict) == (
        "2 of attention, 10 of routed experts in 2 layers, 6 more of experts that got no token with a loss"
    )


def test_a_layer_none_of_whose_experts_got_a_token_is_at_fault():
    assert judge(model(), LAYERS | {"decoder.layers.2.mlp": set()}).faults == [
        "no expert got a token with a loss in 1 layers of routed experts (decoder.layers.2.mlp)"
    ]


def test_a_tensor_learns_if_a_gradient_is_seen_on_any_rank_and_it_changes_on_all():
    name = (QKV.format(1), None)
    assert combined([{name: LEARNS}, {name: DECAYS}])[name] == LEARNS
    assert not combined([{name: LEARNS}, {name: STANDS}])[name].moved


def test_rounded_weights_are_judged_by_the_optimizer_s_exact_copy():
    still = [Observation(True, False, exact, rounded=True) for exact in (True, False, None)]
    assert [seen.moved for seen in still] == [True, False, True]
    name = (QKV.format(1), None)
    assert combined([{name: still[1]}, {name: still[0]}])[name].moved  # each rank has a part of the copy


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.adapter.linear_out.weight", "shared experts"),
        ("decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight", "dense mlp"),
        ("mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight3", "multi-token prediction: routed experts"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "norms"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("embedding.word_embeddings.weight", "embedding"),
    ],
)
def test_tensors_are_told_apart_by_what_they_are_in(name, kind):
    assert kind_of(name) == kind


@pytest.fixture
def detached(configure, ranks, base, work, request):
    """detached(model, part of the names, *overrides) -> the run in which no gradient reaches those."""

    def detached(kind: str, part: str, *overrides: str, **where):
        base(kind)
        output = work / "detached" / hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
        output.mkdir(parents=True)
        (output / "detached.json").write_text(json.dumps({"name": part, **where}))
        paths = (f"paths.output={output}", f"paths.parity={output}/parity.json")
        run = configure(kind, *paths, "train.steps=3", *overrides)
        return ranks("train_detached", run)

    return detached


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            ".mlp.experts.",
            r"(\d+) of \1 tensors of routed experts got no gradient and have not changed \(decoder.layers.1",
        ),
        (
            "layers.2.mlp.experts.linear_fc2",
            r"\d of \d\d tensors of routed experts got no .* \(decoder.layers.2.mlp.*fc2",
        ),
        (".shared_experts.", "6 of 6 tensors of shared experts got no gradient and have not changed"),
    ],
)
def test_adapters_that_no_gradient_reaches_are_named(part, said, detached):
    result = detached("glm4-moe", part)
    assert result.code == 2, result.output
    assert re.search(f"error: not everything is learned after 2 steps: {said}", result.output), result.output


def test_experts_of_one_rank_that_no_gradient_reaches_are_named(detached):
    result = detached("glm4-moe", "experts.linear_fc1", "layout.ep=2", "layout.gpus_per_node=2", ranks=[1])
    assert result.code == 2, result.output
    named = re.search(r"tensors of routed experts got no gradient and have not changed \((.*)\)", result.output)[1]
    assert {int(number) for number in re.findall(r"\[(\d)\]", named)} <= {4, 5, 6, 7}


def test_inner_matrices_that_no_gradient_reaches_are_named_a_step_later(detached):
    result = detached("glm4-moe", "experts.linear_fc1.adapter.linear_in")
    assert result.code == 2, result.output
    said = r"not everything is learned after 3 steps: \d+ of \d+ tensors of routed experts got no gradient"
    assert re.search(said, result.output), result.output


def test_full_fine_tuning_names_weights_that_decay_alone_has_changed(detached):
    full = ("adapter.kind=none", "optimizer.weight_decay=0.1", "optimizer.lr=1e-3")
    result = detached("glm4-moe", "layers.1.mlp.experts.linear_fc2", *full)
    assert result.code == 2, result.output
    said = r"not everything is learned after 2 steps: \d of \d\d tensors of routed experts got no gradient \(decoder"
    assert re.search(said, result.output), result.output


@pytest.mark.slow
def test_steps_that_bf16_rounds_away_are_seen_in_the_optimizer_s_copies(configure, ranks, base, work):
    """Of norms near 1, no step of a small learning rate shows in bf16; each of two ranks has a part of the copies."""
    bf16 = ("train.precision=bf16", f"paths.base={work}/bf16-base")
    assert ranks("convert", configure("glm4-moe-mtp", *bf16)).code == 0
    full = ("adapter.kind=none", "optimizer.lr=1e-6", "train.steps=3", "layout.gpus_per_node=2")
    paths = (f"paths.output={work}/rounded", f"paths.parity={work}/rounded/parity.json")
    result = ranks("train", configure("glm4-moe-mtp", *bf16, *full, *paths))
    assert result.code == 0, result.output
    assert re.search(r"learning check: after 2 steps all \d+ weights learn: .* norms, 1 of output layer", result.output)


def test_what_was_checked_is_said_at_each_start(configure, ranks, base, work):
    base("glm4-moe")
    paths = (f"paths.output={work}/said", f"paths.parity={work}/said/parity.json", "checkpoint.save_every=4")
    first = ranks("train", configure("glm4-moe", *paths, "train.stop_after=4"))
    said = r"8 of attention, 2 of dense mlp, (\d+) of routed experts in 3 layers, 6 of shared experts, (\d+) more of"
    outer = re.search(rf"after 2 steps all \d+ outer matrices \(B\) of adapters learn: {said}", first.output)
    assert int(outer[1]) + int(outer[2]) == 48, first.output
    assert re.search(r"after 3 steps all \d+ inner matrices \(A\) of adapters learn: 8 of attention", first.output)
    again = ranks("train", configure("glm4-moe", *paths, "train.stop_after=5"))
    assert "learning check: skipped, because this start ran 1 steps and the check needs 2" in again.output
