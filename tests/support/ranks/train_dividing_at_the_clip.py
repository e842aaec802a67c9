"""trainer.train as on a GPU, where gradients are divided by the tokens as they are clipped, and nowhere else."""

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    from megatron.core.distributed import param_and_grad_buffer

    from trainer import train
    from trainer.patches.gradients import token_count

    def refuse(*_) -> None:
        raise AssertionError("gradients were divided before they are clipped")

    assert token_count.helps(run)
    token_count.install()
    token_count.install()
    param_and_grad_buffer._ParamAndGradBuffer.scale_gradients = refuse
    train.main(run)
