"""Train while no gradient reaches some of the trained tensors, as where they are detached.

paths.output/detached.json names them by parts of their names, and says on which expert-parallel ranks.
"""

import json
from pathlib import Path

from conf.schema.run import Run
from trainer import train


def main(run: Run) -> None:
    asked = json.loads((Path(run.paths.output) / "detached.json").read_text())
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from trainer.training.learning_check import LearningCheck

    original = LearningCheck.on_train_start

    def detached(self, context):
        original(self, context)
        for chunk in unwrap_model(context.model):
            for name, parameter in chunk.named_parameters():
                here = parallel_state.get_expert_model_parallel_rank() in asked.get("ranks", [0, 1])
                if parameter.requires_grad and asked["name"] in name and here:
                    parameter.register_hook(lambda gradient: gradient * 0)

    LearningCheck.on_train_start = detached
    train.main(run)
