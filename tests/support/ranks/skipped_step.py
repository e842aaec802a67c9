"""A step that is skipped, and one that is not, behind the end of the learning check."""

from types import SimpleNamespace

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer.training.learning_check import LearningCheck

    gates = LearningCheck(SimpleNamespace(), SimpleNamespace())  # as it is once it has given up what it compared
    gates.on_train_step_end(SimpleNamespace(skipped_iter=True))
    gates.on_train_step_end(SimpleNamespace(skipped_iter=False))
