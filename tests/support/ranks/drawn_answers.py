"""Answers drawn for a training by trainer/reinforcement, without vLLM: the same at every layout.

With routes as well, which are drawn too: no router would choose them by itself.
"""

from itertools import chain
from random import Random
from typing import Any

import numpy
from megatron.bridge.training.callbacks import Callback

from conf.schema.reinforcement import Reinforce
from conf.schema.run import Run
from trainer.reinforcement import routes
from trainer.reinforcement.policy import exact_logits
from trainer.reinforcement.policy.policy_step import Feed, FromOutside, PolicyStep, batches_of_rank, log_probs
from trainer.reinforcement.samples import Scored

VOCABULARY = 100
SETTINGS = {
    "grpo": {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0, "kl": 0.1},
    "gspo": {"correction": "sequence_mask", "correction_low": 0.5, "correction_high": 5.0},
    "cispo": {"correction": "tis"},
}


REPLAYED = "replayed"  # behind a loss: with routes


class Answers(Callback):
    """Callback that gives each step its answers."""

    def __init__(self, run: Run, feed: Feed, step: PolicyStep, replayed: bool):
        self.run, self.feed, self.step, self.replayed = run, feed, step, replayed
        self.said: dict[int, list[float]] = {}  # log-probabilities of this rank's answers, before the first step

    def on_train_start(self, context: Any) -> None:
        if self.run.world > 1:  # what others are held against is of megatron-core's own product
            exact_logits.install(context.model)
        if self.replayed:
            self.step.replay.install(context.model)
        self.said |= log_probs(self.run, context, self.step, self._drawn(context))

    def on_train_step_start(self, context: Any) -> None:
        answers = self._drawn(context)
        self.step.begin(answers)
        self.feed.give(batches_of_rank(self.run, answers))

    def on_train_step_end(self, context: Any) -> None:
        if context.state.cfg.model.recompute_granularity:  # each micro batch's experts were taken once again
            assert not any(one.router_replay.recomputed.kept for one in chain(*self.step.replay.routers.values()))
        self.step.replay.end()

    def _drawn(self, context: Any) -> list[Scored]:
        model = context.state.cfg.model
        experts = (model.num_layers, model.moe_router_topk, model.num_moe_experts) if self.replayed else None
        return drawn(self.run, context.state.train_state.step, experts)


def fed(run: Run, policy: str) -> tuple[FromOutside, PolicyStep, list[Callback]]:
    """Dataset, forward_step and callbacks, the first of which comes before others."""
    loss, _, replayed = policy.partition(" ")
    feed = Feed()
    keys: dict[str, Any] = {"loss": loss, "clip_low": 0.9, "clip_high": 9.0, "max_tokens": 20, "updates": 2}
    step = PolicyStep(Reinforce(**keys | SETTINGS[loss]))
    return FromOutside.of(run, feed), step, [Answers(run, feed, step, replayed == REPLAYED), feed]


def drawn(run: Run, seed: int, experts: tuple[int, int, int] | None = None) -> list[Scored]:
    """Answers. `experts` are layers, experts of a token and experts in all."""
    random, chance = Random(seed), numpy.random.default_rng(seed)

    def chosen(tokens: int) -> str | None:
        if experts is None:
            return None
        layers, count, of = experts
        order = chance.random((tokens, layers, of)).argsort(-1)
        return routes.written(order[..., :count].astype(numpy.uint8))

    def one() -> Scored:
        prompt, answer = ([random.randrange(VOCABULARY) for _ in range(random.randint(1, most))] for most in (40, 20))
        old = [random.uniform(-6, -3) for _ in answer]
        engine, reference = ([value + random.gauss(0, 0.3) for value in old] for _ in range(2))
        told = chosen(len(prompt) + len(answer) - 1)
        return Scored(prompt, answer, engine, random.gauss(0, 1), old, reference, told)

    return [one() for _ in range(run.train.global_batch)]
