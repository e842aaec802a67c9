"""Megatron's loss scaling for fp16, with an optimizer that can be saved from the first step on."""

from megatron.bridge.training.callbacks import Callback


class LossScaling(Callback):
    """Create the optimizer's states before the first step.

    Megatron-core cannot save an optimizer without states, and it has none if all steps so far were skipped.
    """

    def on_train_start(self, context) -> None:
        for optimizer in getattr(context.optimizer, "chained_optimizers", [context.optimizer]):
            if optimizer.init_state_fn and not optimizer.is_stub_optimizer:
                optimizer.init_state_fn(optimizer.optimizer, optimizer.config)  # keeps states that exist
