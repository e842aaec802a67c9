"""Experts that vLLM chose are those that the trainer's routers take, and no others."""

import json

import numpy
import pytest
import torch

from contract.faults import Fault
from trainer.reinforcement import routes
from trainer.reinforcement.batches import Form, micro_batches
from trainer.reinforcement.samples import Scored

LAYERS, CHOSEN, EXPERTS = 3, 2, 8


def drawn(tokens: int, dtype: type = numpy.uint8) -> numpy.ndarray:
    draw = numpy.random.default_rng(tokens)
    chosen = [draw.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens * LAYERS)]
    return numpy.array(chosen).reshape(tokens, LAYERS, CHOSEN).astype(dtype)


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.uint16])
def test_routes_are_read_as_they_were_written(dtype):
    found = drawn(5, dtype)
    assert routes.read(routes.written(found)).tolist() == found.tolist()


@pytest.mark.parametrize("form", [Form(2, 8, 0, 1), Form(1, 20, 4, 1)])
def test_each_token_that_the_model_reads_has_its_routes(form):
    sequences = []
    for prompt, answer in (2, 3), (4, 2), (1, 5):
        known = routes.written(drawn(prompt + answer - 1))
        sequences.append(Scored([*range(prompt)], [7] * answer, [-0.5] * answer, 1.0, None, None, known))
    seen = 0
    for batch in micro_batches(sequences, form, rank=0, ranks=1):
        assert batch["routes"].shape == (form.rows, form.length, LAYERS, CHOSEN)
        flat = batch["routes"].flatten(0, 1)
        assert (flat[..., 0] != flat[..., 1]).all()  # padding too has different experts
        for place, number in enumerate(batch["numbers"].tolist()):
            one = sequences[number]
            start = int(batch["places"][place, 0]) - len(one.prompt) + 1
            expected = drawn(len(one.prompt) + len(one.answer) - 1)
            assert flat[start : start + len(expected)].tolist() == expected.tolist()
            seen += 1
    assert seen == len(sequences)
    without = micro_batches([Scored([1], [2], [0.0], 1.0, None, None)], form, rank=0, ranks=1)
    assert "routes" not in without[0]


def test_an_engine_that_tells_nothing_of_its_experts_is_found():
    with pytest.raises(Fault, match=r"^reinforce.replay_experts: vLLM returned the same expert for all choices"):
        routes.require_known(torch.zeros(4, LAYERS, CHOSEN, dtype=torch.long), 4)
    with pytest.raises(Fault, match=r"routes of 4 tokens, but has read 5$"):
        routes.require_known(torch.from_numpy(drawn(4)).long(), 5)


def test_what_is_recomputed_takes_the_experts_of_its_own_micro_batch():
    from torch.utils.checkpoint import checkpoint

    scores, choice, taken = torch.rand(4, EXPERTS, requires_grad=True), routes.Choice(), []

    def own_choice(*_, **__):
        pytest.fail("it chose by itself")

    def router(given: torch.Tensor) -> torch.Tensor:
        found, chosen = choice.get_replay_topk(
            given, CHOSEN, None, None, lambda *_, **__: pytest.fail("its own choice")
        )
        taken.append(chosen)
        return found.sum()

    first, second = (torch.from_numpy(drawn(4 * count)[:4, 0]).long() for count in (1, 2))
    losses = []
    for chosen in first, second:  # as a pipeline does: both go forward before one goes backward
        choice.begin(chosen)
        losses.append(checkpoint(router, scores, use_reentrant=True))
    assert [one.tolist() for one in taken] == [first.tolist(), second.tolist()]
    for loss in losses:
        loss.backward()
    assert [one.tolist() for one in taken[2:]] == [first.tolist(), second.tolist()]
    assert not choice.recomputed.kept
    choice.end()
    assert choice.get_replay_topk(scores, CHOSEN, 1, 2, lambda *given, **named: (given, named))[1] == {
        "num_groups": 1,
        "group_topk": 2,
    }


def test_experts_of_other_tokens_than_a_router_reads_are_refused():
    choice = routes.Choice()
    choice.begin(torch.from_numpy(drawn(3)[:, 0]).long())
    with pytest.raises(Fault, match=r"needs 2 experts for each of 4 tokens, but the routes have the shape \(3, 2\)"):
        choice.get_replay_topk(torch.rand(4, EXPERTS), CHOSEN, None, None, lambda: None)


BF16 = {"train.precision": "bf16", "reinforce.steps": 2, "reinforce.prompts": 8, "train.global_batch": 32}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packed", [False, True])
def test_with_the_same_experts_trainer_and_engine_are_nearer(packed, finish):
    keys = BF16 | {"data.packed": packed, "train.micro_batch": 1 if packed else 8}
    found = {}
    for replayed in (False, True):
        folder = finish(f"replayed-{replayed}-{packed}", keys | {"reinforce.replay_experts": replayed})
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[replayed] = [line for line in lines if line["kind"] == "reinforce"]
    assert found[True][0]["length"] == found[False][0]["length"]  # the first step's samples are the same
    apart = {replayed: sum(line["mismatch_k3"] for line in lines) for replayed, lines in found.items()}
    assert 0 < apart[True] < apart[False], apart
