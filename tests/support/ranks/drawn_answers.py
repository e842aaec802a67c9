"""Answers drawn for a training by trainer/reinforcement, without vLLM: the same at every layout."""

from random import Random
from typing import Any

from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state

from conf.schema.run import Run
from trainer.reinforcement.batches import Form, micro_batches
from trainer.reinforcement.losses import Settings
from trainer.reinforcement.policy_step import Feed, FromOutside, PolicyStep
from trainer.reinforcement.samples import Scored

VOCABULARY = 100
SETTINGS = {
    "grpo": {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0, "kl": 0.1},
    "gspo": {"correction": "sequence_mask", "correction_low": 0.5, "correction_high": 5.0},
    "cispo": {"correction": "tis"},
}


class Answers(Callback):
    """Callback that gives each step its answers."""

    def __init__(self, run: Run, feed: Feed, step: PolicyStep):
        self.run, self.feed, self.step = run, feed, step

    def on_train_step_start(self, context: Any) -> None:
        answers = drawn(self.run, context.state.train_state.step)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.step.begin(answers)
        self.feed.give(micro_batches(answers, Form.of(self.run), rank, ranks))


def fed(run: Run, loss: str) -> tuple[FromOutside, PolicyStep, list[Callback]]:
    """Dataset, forward_step and callbacks, the first of which comes before others."""
    feed = Feed()
    settings = Settings(loss=loss, clip_low=0.9, clip_high=9.0, longest=20, **SETTINGS[loss])
    step = PolicyStep(settings, with_old=True, with_reference=settings.kl > 0)
    return FromOutside.of(run, feed), step, [Answers(run, feed, step), feed]


def drawn(run: Run, seed: int) -> list[Scored]:
    random = Random(seed)

    def one() -> Scored:
        prompt, answer = ([random.randrange(VOCABULARY) for _ in range(random.randint(1, most))] for most in (40, 20))
        old = [random.uniform(-6, -3) for _ in answer]
        engine, reference = ([value + random.gauss(0, 0.3) for value in old] for _ in range(2))
        return Scored(prompt, answer, engine, random.gauss(0, 1), old, reference)

    return [one() for _ in range(run.train.global_batch)]
