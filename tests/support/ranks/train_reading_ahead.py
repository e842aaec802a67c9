"""trainer.train as on a GPU, where the next step's batch is read before this step has ended."""

from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    from trainer.startup import device

    device.start()  # before the first import of Megatron
    from megatron.core.optimizer import ChainedOptimizer

    from trainer import train
    from trainer.megatron import next_batch

    ahead, made = [], next_batch.NextBatch

    def kept() -> next_batch.NextBatch:
        ahead.append(made())
        return ahead[0]

    step, seen = ChainedOptimizer.step, []

    def counted(self):
        seen.append(ahead[0].prefetched is not None)
        return step(self)

    next_batch.helps, next_batch.NextBatch, ChainedOptimizer.step = lambda run: True, kept, counted
    train.main(run)
    Path(run.paths.output, "ahead.txt").write_text(f"{sum(seen)} of {len(seen)}")
