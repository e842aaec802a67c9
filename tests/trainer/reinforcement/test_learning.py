"""Rewards teach what a policy did not know, and the same rewards in another order within each group teach nothing.

The policy is trained on tickets that name the right team in one of ten cases, and the next one in all others, so that
greedy answers are wrong. The expected gradient of shuffled rewards is 0. Adam makes steps of noise as long as any,
though, unless steps wait for a signal (reinforce.signal): docs/measurements/reinforce.md compares the policy with and
without it. A policy of two layers shows it in seconds.
"""

import json
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
import torch

from conf.schema.reinforcement import Reinforce
from tests.support.shuffled_rewards import among
from tests.trainer.reinforcement.conftest import TRAINER
from trainer.data.tickets import tickets, with_mistakes
from trainer.reinforcement.policy import advantages
from trainer.reinforcement.policy.losses import Batch, objective
from trainer.training.gradient_signal import GradientSignal, cosine_of, products

RIGHT, ROWS, HELD_OUT = 0.1, 1600, 64
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
STARTS = {"train.steps": 120, "train.global_batch": 16, "train.micro_batch": 16, "optimizer.lr": 2e-3}
STARTS |= {"optimizer.warmup_steps": 5, "train.validate_every": 0, "checkpoint.save_every": 120}
TAUGHT = {
    "train.global_batch": 16,
    "train.micro_batch": 16,
    "checkpoint.save_every": 60,
    "reinforce.start": "trained",
    "reinforce.steps": 60,
    "reinforce.prompts": 16,
    "reinforce.samples": 8,
    "reinforce.lr": 1.5e-4,
    "reinforce.signal": 3,
    "reinforce.clip_high": 0.28,
    "reinforce.reward": "exact",
    "reinforce.pattern": "null",
    "reinforce.held_out": HELD_OUT,
}


@pytest.fixture
def taught(finish, place):
    """taught(name, overrides, module) -> held-out greedy exact match before and after"""

    def taught(name: str, overrides: dict[str, object], module: str = TRAINER) -> tuple[float, float]:
        given, start = tickets(ROWS, seed=0), place / "mistaken"
        for folder, labels in ("right-tickets", given), ("mistaken-tickets", with_mistakes(given, 0, RIGHT)):
            write(place / folder, labels)
        if not (start / "checkpoints").exists():
            finish("start", STARTS | {"paths.output": start, "paths.data": place / "mistaken-tickets"}, "trainer.train")
        paths = {"paths.output": start, "paths.data": place / "right-tickets"}
        folder = finish(name, TAUGHT | paths | overrides, module)
        found = json.loads((folder / "reinforced.json").read_text())
        return found["before"], found["after"]

    return taught


def write(folder: Path, labels: dict[str, str]) -> None:
    if folder.exists():
        return
    folder.mkdir()
    lines = [json.dumps({"input": ticket, "output": team}) + "\n" for ticket, team in labels.items()]
    parts = {"test": lines[:HELD_OUT], "validation": lines[HELD_OUT : 2 * HELD_OUT], "training": lines[2 * HELD_OUT :]}
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(rows))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rewards_teach_greedy_answers_too(seed, taught):
    before, after = taught(f"taught-{seed}", {"reinforce.seed": seed})
    assert before <= 0.1 and after >= 0.6, (before, after)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_rewards_in_another_order_leave_greedy_answers_as_they_were(seed, taught):
    before, after = taught(f"shuffled-{seed}", {"reinforce.seed": seed}, "tests.support.shuffled_rewards")
    assert before <= 0.1 and abs(after - before) <= 0.1, (before, after)


def test_a_shuffle_keeps_a_group_s_rewards_and_any_order_of_them_is_as_likely():
    draw, found = Random(5), {}
    for _ in range(6000):
        order = tuple(among([3.0, 1.0, 2.0], draw))
        found[order] = found.get(order, 0) + 1
    assert found.keys() == {*permutations([1.0, 2.0, 3.0])}
    assert all(abs(count - 1000) < 150 for count in found.values())  # five deviations


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_over_all_orders_of_rewards_the_gradient_is_nothing_where_answers_are_alike_too(loss):
    """Two of four answers are the same; three have a reward."""
    weight = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    which, lengths = torch.tensor([0, 0, 1, 2]), torch.tensor([2, 2, 3, 1])
    mask = (torch.arange(3)[None] < lengths[:, None]).double()
    total = torch.zeros(3, dtype=torch.float64)
    largest = 0.0
    for rewards in permutations([1.0, 1.0, 1.0, 0.0]):
        worth = torch.tensor(advantages.of_group(rewards, loss), dtype=torch.float64)
        new = torch.log_softmax(weight, 0)[which][:, None] * mask
        old = new.detach()
        of_order, _ = objective(
            Reinforce(loss=loss, clip_low=0.2, clip_high=0.2, max_tokens=3, correction="none"),
            Batch(new, old, old, worth[:, None] * mask, mask, None),
        )
        (gradient,) = torch.autograd.grad(of_order, weight)
        total += gradient
        largest = max(largest, float(gradient.abs().max()))
    assert largest > 0.01 and float(total.abs().max()) < 1e-12


TEAMS, TEXTS = 5, 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_of_two_layers_learns_from_rewards_and_not_from_their_shuffle(seed):
    """The same task without words, steps and answers as many: what Adam makes of gradients that are nothing but noise.

    Each of its steps is as long as any. So noise moves a policy as far as the root of their number, and rewards as far
    as their number: with steps of twice the length, one shuffle in four had a team's texts right.
    """
    before, after = played(seed, shuffled=False)
    assert before == 0 and after >= 0.8
    assert played(seed, shuffled=True)[1] <= 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_three_times_the_length_move_it_by_a_signal_alone(seed):
    assert played(seed, shuffled=False, longer=3, asked=3)[1] >= 0.8
    assert played(seed, shuffled=True, longer=3, asked=3)[1] <= 0.1


def test_without_asking_for_a_signal_noise_moves_one_of_them():
    assert max(played(seed, shuffled=True, longer=3)[1] for seed in range(4)) > 0.1


def played(seed: int, shuffled: bool, longer: float = 1, asked: float = 0) -> tuple[float, float]:
    """Share of texts whose likeliest team is the right one, before and after."""
    draw, order = torch.Generator().manual_seed(seed), Random(seed)
    team = torch.arange(TEXTS) % TEAMS
    texts = torch.randn(TEAMS, 16, generator=draw)[team] + 0.5 * torch.randn(TEXTS, 16, generator=draw)
    first, second = torch.randn(16, 32, generator=draw) / 4, torch.zeros(32, TEAMS)
    weights = [first.requires_grad_(), second.requires_grad_()]

    def log_probs() -> torch.Tensor:
        return torch.log_softmax(torch.tanh(texts @ first) @ second, -1)

    def right() -> float:
        return (log_probs().argmax(-1) == team).float().mean().item()

    labels = torch.zeros(TEXTS, TEAMS)
    labels[torch.arange(TEXTS), team], labels[torch.arange(TEXTS), (team + 1) % TEAMS] = RIGHT, 1 - RIGHT
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(400):
        step(optimizer, -(labels * log_probs()).sum(-1).mean())
    before, rate, beta = right(), longer * 1.25e-3, 0.9
    optimizer, signal = torch.optim.Adam(weights, lr=rate, betas=(beta, 0.999)), GradientSignal(asked)
    for _ in range(80):
        drawn = torch.randint(TEXTS, (16,), generator=draw)
        chances = log_probs()[drawn]
        answers = torch.multinomial(chances.exp().detach(), 8, replacement=True, generator=draw)
        rewards = [[float(one) for one in row] for row in answers == team[drawn][:, None]]
        rewards = [among(row, order) for row in rewards] if shuffled else rewards
        worth = torch.tensor([advantages.of_group(row, "grpo") for row in rewards]).flatten()[:, None]
        new = chances.gather(1, answers).flatten()[:, None]
        old = new.detach()
        loss, _ = objective(Reinforce(correction="none"), Batch(new, old, old, worth, torch.ones_like(old), None))
        optimizer.param_groups[0]["lr"] = rate
        signal.shorten(optimizer)
        step(optimizer, loss / len(new))
        signal.add(cosine(optimizer, weights, beta))
    return before, right()


def cosine(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], beta: float) -> float:
    sums = torch.zeros(3, dtype=torch.float64)
    for weight in weights:
        assert weight.grad is not None
        sums += products(weight.grad, optimizer.state[weight]["exp_avg"], beta)
    return cosine_of(sums)


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
