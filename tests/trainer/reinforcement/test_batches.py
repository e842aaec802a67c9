"""Micro batches of answers, padded and packed."""

from random import Random

import pytest
import torch

from trainer.reinforcement.batches import Form, balanced, micro_batches
from trainer.reinforcement.samples import Scored

PADDED, PACKED = Form(2, 64, 0, 1), Form(1, 64, 16, 1)


@pytest.fixture
def answers() -> list[Scored]:
    random = Random(0)

    def one(number: int) -> Scored:
        prompt, answer = ([random.randrange(100) for _ in range(random.randint(1, most))] for most in (30, 20))
        return Scored(prompt, answer, [-random.random() for _ in answer], random.gauss(0, 1), None, None)

    return [one(number) for number in range(12)]


@pytest.mark.parametrize("form", [PADDED, PACKED])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_have_every_answer_once_and_its_tokens_where_they_are_predicted(form, ranks, answers):
    every = [micro_batches(answers, form, rank, ranks) for rank in range(ranks)]
    assert len({len(one) for one in every}) == 1
    found = {}
    for batch in (batch for one in every for batch in one):
        assert batch["tokens"].shape == (form.rows, form.length)
        assert batch["loss_mask"].sum() == batch["mask"].sum()
        for place, number in enumerate(batch["numbers"].tolist()):
            assert number not in found
            one, kept = answers[number], batch["mask"][place].bool()
            at = batch["places"][place][kept]
            assert batch["labels"].flatten()[at].tolist() == one.answer
            assert batch["tokens"].flatten()[at].tolist() == [one.prompt[-1], *one.answer[:-1]]
            assert batch["position_ids"].flatten()[at][0] == len(one.prompt) - 1
            assert batch["engine"][place][kept].tolist() == pytest.approx(one.engine)
            found[number] = batch
    assert len(found) == len(answers)


def test_packs_are_few_and_alike():
    lengths = [16, 64, 48, 16, 16, 32, 48, 16]
    packs = balanced(lengths, 128, ranks=2, groups=1)
    assert [sum(lengths[number] for number in pack) for pack in packs] == [128, 128]
    assert len(balanced(lengths, 64, ranks=2, groups=2)) % 4 == 0


def test_a_pack_without_an_answer_is_a_row_that_counts_nothing():
    (batch,) = micro_batches([Scored([1], [2], [0.0], 1.0, None, None)], PACKED, rank=1, ranks=2)
    assert batch["mask"].sum() == 0 and batch["cu_seqlens_q"].tolist() == [[0, 64]]
    assert torch.equal(batch["tokens"], torch.zeros(1, 64, dtype=torch.long))
