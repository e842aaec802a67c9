"""Losses beside formulas written out from the published implementations, on the same batch."""

import math
from dataclasses import replace

import pytest
import torch

from conf.schema.reinforcement import Reinforce
from trainer.reinforcement.policy.losses import Batch, by_answer, k3, objective

ANSWERS, TOKENS = 5, 7
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


@pytest.fixture
def batch() -> Batch:
    draw = torch.Generator().manual_seed(3)
    old = -torch.rand(ANSWERS, TOKENS, generator=draw, dtype=torch.float64) * 3
    new = (old + 0.4 * torch.randn(ANSWERS, TOKENS, generator=draw, dtype=torch.float64)).requires_grad_()
    engine = old + 0.5 * torch.randn(ANSWERS, TOKENS, generator=draw, dtype=torch.float64)
    lengths = torch.tensor([7, 3, 1, 5, 4])
    mask = (torch.arange(TOKENS)[None] < lengths[:, None]).double()
    advantages = torch.tensor([1.2, -0.7, 0.3, 0.0, -1.1]).double()[:, None] * mask
    return Batch(new, old, engine, advantages, mask, reference=old - 0.1)


def settings_of(**keys: object) -> Reinforce:
    """Settings without a correction. Values are not checked, as a clip_low above 1 turns the clipping off."""
    return Reinforce().model_copy(update={"correction": "none"} | keys)


def count(settings: Reinforce, batch: Batch) -> int:
    """What the sum of losses is divided by."""
    return len(batch.mask) if by_answer(settings.loss) else int(batch.mask.sum())


def number(tensor: torch.Tensor) -> float:
    return tensor.detach().item()


def rows(batch: Batch):
    """Numbers of each answer, without padding."""
    for i in range(ANSWERS):
        length = int(batch.mask[i].sum())
        yield (
            tuple(part[i, :length].tolist() for part in (batch.new, batch.old, batch.engine, batch.advantages)),
            length,
        )


def verl_clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    """verl, core_algos.compute_policy_loss_vanilla without its dual clip; TRL's _compute_loss is the same."""
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def by_hand(batch: Batch, settings: Reinforce) -> float:
    """The whole loss, already divided."""
    per_answer, tokens = [], 0
    for (new, old, _, advantages), length in rows(batch):
        if settings.loss == "gspo":  # verl, compute_policy_loss_gspo
            ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / length)
            losses = [verl_clipped(ratio, a, settings.clip_low, settings.clip_high) for a in advantages]
        elif settings.loss == "cispo":  # MiniMax-M1, equation 4; TRL's has no lower bound, as clip_low 1 has none
            losses = [
                -min(max(math.exp(n - o), 1 - settings.clip_low), 1 + settings.clip_high) * a * n
                for n, o, a in zip(new, old, advantages, strict=True)
            ]
        else:
            losses = [
                verl_clipped(math.exp(n - o), a, settings.clip_low, settings.clip_high)
                for n, o, a in zip(new, old, advantages, strict=True)
            ]
        per_answer.append(losses)
        tokens += length
    if settings.loss in ("dapo", "cispo"):  # TRL: (loss * mask).sum() / num_items_in_batch; verl: token-mean
        return sum(map(sum, per_answer)) / tokens
    if settings.loss == "dr_grpo":  # TRL: (loss * mask).sum() / (batch * max_completion_length)
        return sum(map(sum, per_answer)) / (ANSWERS * settings.max_tokens)
    return sum(sum(losses) / len(losses) for losses in per_answer) / ANSWERS  # seq-mean-token-mean


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_the_published_one(loss, batch):
    settings = settings_of(loss=loss, clip_low=0.2, clip_high=0.28, max_tokens=TOKENS)
    loss_of_batch, _ = objective(settings, batch)
    assert number(loss_of_batch) / count(settings, batch) == pytest.approx(by_hand(batch, settings), abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_its_gradient_is_that_of_finite_differences(loss, batch):
    """But for gspo and cispo, whose published gradients are not those of their values."""
    if loss in ("gspo", "cispo"):
        pytest.skip("defined by its gradient, below")
    settings = settings_of(loss=loss, clip_low=0.2, clip_high=0.28, max_tokens=TOKENS, kl=0.3)
    whole, _ = objective(settings, batch)
    whole.backward()
    step = 1e-6
    for place in [(0, 0), (1, 2), (4, 3), (2, 5)]:
        moved = batch.new.detach().clone()
        moved[place] += step
        higher, _ = objective(settings, replace(batch, new=moved))
        slope = (number(higher) - number(whole)) / step
        assert float(batch.new.grad[place]) == pytest.approx(slope, abs=1e-5)


def test_a_token_of_cispo_has_its_gradient_where_it_is_clipped(batch):
    """MiniMax-M1: clip(r).detach() * A * grad log p."""
    settings = settings_of(loss="cispo", clip_low=0.2, clip_high=0.28)
    objective(settings, batch)[0].backward()
    ratio = torch.exp(batch.new.detach() - batch.old)
    assert torch.allclose(batch.new.grad, -ratio.clamp(0.8, 1.28) * batch.advantages * batch.mask)


def test_a_token_of_gspo_has_the_gradient_of_its_answer(batch):
    """GSPO, equation 10: A * s * grad log p / |y|, where the answer is not clipped."""
    objective(settings_of(loss="gspo", clip_low=9.0, clip_high=9.0), batch)[0].backward()
    for i, ((new, old, _, advantages), length) in enumerate(rows(batch)):
        ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / length)
        expected = [-a * ratio / length for a in advantages]
        assert batch.new.grad[i, :length].tolist() == pytest.approx(expected)


def test_corrections_are_the_published_ones(batch):
    """tis: verl's and TRL's token_truncate. icepop: TRL's token_mask. sequence_mask: OpenRLHF's seq-mask-tis."""
    plain = settings_of(loss="dapo", clip_low=0.2, clip_high=0.28)
    for kind in ("tis", "icepop", "sequence_mask"):
        expected, tokens = 0.0, 0
        for (new, old, engine, advantages), length in rows(batch):
            apart = [o - e for o, e in zip(old, engine, strict=True)]
            whole = math.exp(sum(apart) / length)
            for n, o, a, d in zip(new, old, advantages, apart, strict=True):
                ratio = math.exp(d)
                weight = {
                    "tis": min(ratio, 1.5),
                    "icepop": ratio if 0.7 <= ratio <= 1.5 else 0.0,
                    "sequence_mask": ratio if 0.7 <= whole <= 1.5 else 0.0,
                }[kind]
                expected += weight * verl_clipped(math.exp(n - o), a, 0.2, 0.28)
            tokens += length
        settings = settings_of(
            loss="dapo", clip_low=0.2, clip_high=0.28, correction=kind, correction_low=0.7, correction_high=1.5
        )
        corrected, _ = objective(settings, batch)
        assert number(corrected) / count(settings, batch) == pytest.approx(expected / tokens, abs=1e-9), kind
        assert number(objective(plain, batch)[0]) != pytest.approx(number(corrected))


def test_the_divergence_is_schulman_s_and_exact_where_both_nearly_agree(batch):
    settings = settings_of(loss="dapo", kl=0.5)
    (loss, figures), (without, _) = objective(settings, batch), objective(settings_of(loss="dapo"), batch)
    expected = sum(
        math.exp(o - 0.1 - n) - (o - 0.1 - n) - 1
        for (new, old, _, _), _ in rows(batch)
        for n, o in zip(new, old, strict=True)
    )
    assert number(loss - without) == pytest.approx(0.5 * expected, abs=1e-9)
    assert float(figures["kl"]) == pytest.approx(expected, abs=1e-9)
    assert float(k3(torch.tensor(1e-4))) == pytest.approx(5e-9, rel=1e-3)
    assert float(k3(torch.tensor(-1e-4))) > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up(loss, batch):
    settings = settings_of(loss=loss, correction="tis", kl=0.1, max_tokens=TOKENS)
    whole, _ = objective(settings, batch)
    parts = [
        objective(settings, Batch(*(getattr(batch, name)[cut] for name in batch.__dataclass_fields__)))
        for cut in (slice(0, 2), slice(2, 5))
    ]
    assert sum(number(loss) for loss, _ in parts) == pytest.approx(number(whole))


def test_what_stands_behind_an_answer_does_not_count(batch):
    nothing = 1 - batch.mask
    for loss in LOSSES:
        settings = settings_of(loss=loss, correction="icepop", kl=0.1, max_tokens=TOKENS)
        odd = Batch(
            batch.new.detach() + 50 * nothing,
            batch.old - 70 * nothing,
            batch.engine + 30 * nothing,
            batch.advantages,
            batch.mask,
            batch.reference - 900 * nothing,
        )
        assert number(objective(settings, odd)[0]) == pytest.approx(number(objective(settings, batch)[0]))


def test_figures_are_sums_over_tokens(batch):
    _, figures = objective(settings_of(correction="tis", correction_high=1.2), batch)
    apart = [o - e for (_, old, engine, _), _ in rows(batch) for o, e in zip(old, engine, strict=True)]
    assert float(figures["tokens"]) == 20
    assert float(figures["mismatch"]) == pytest.approx(sum(map(abs, apart)))
    assert float(figures["mismatch_max"]) == pytest.approx(max(map(abs, apart)))
    assert float(figures["mismatch_k3"]) == pytest.approx(sum(math.exp(d) - 1 - d for d in apart))
    assert float(figures["corrected"]) == sum(math.exp(d) > 1.2 for d in apart)
