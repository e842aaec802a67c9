"""Megatron's loss scaling for fp16, with an optimizer that can be saved from the first step on."""

from megatron.bridge.training.callbacks import Callback


class LossScaling(Callback):
    """Begin with an optimizer that has its states: core cannot save one all of whose steps were skipped."""

    def on_train_start(self, context) -> None:
        for one in getattr(context.optimizer, "chained_optimizers", [context.optimizer]):
            if one.init_state_fn and not one.is_stub_optimizer:
                one.init_state_fn(one.optimizer, one.config)  # of what has none yet
