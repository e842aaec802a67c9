"""A reinforcement learning whose rewards say nothing: those of each group are shuffled among its answers.

python -m tests.support.shuffled_rewards CONF [key=value ...]
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from conf.schema.run import Run
from trainer import reinforce
from trainer.checks import inputs, places
from trainer.startup import entry


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()
    from trainer.reinforcement.steps.sampler import Sampler

    rewarded, draw = Sampler._reward, Random(run.reinforce.seed)

    def shuffled(self: Any, groups: Sequence[Any]) -> None:
        rewarded(self, groups)
        for group in groups:
            for answer, reward in zip(group.answers, among(group.rewards, draw), strict=True):
                answer.reward = reward

    Sampler._reward = shuffled
    reinforce.main(run)


def among(rewards: Sequence[float], draw: Random) -> list[float]:
    """The same rewards in an order that knows nothing of the answers."""
    return draw.sample(list(rewards), len(rewards))


if __name__ == "__main__":
    entry.start(main, inputs.check_reinforce, writes="reinforced", may_write=places.check_reinforce, gpus="train")
