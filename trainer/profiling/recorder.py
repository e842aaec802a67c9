"""Recording of whole steps by torch's profiler, as a callback of Megatron-Bridge's loop.

The step before a recorded one is profiled too and thrown away: starting the profiler takes a while. Neither stacks nor
shapes are recorded, which would cost the host more than the work that is looked at.
"""

# pyright: reportArgumentType=false

import os
from pathlib import Path

from conf.schema.run import Run
from trainer.profiling.report import TRACE
from trainer.startup import device

FEW = 8  # ranks: all are recorded, and so as late as one another; of more the first and the last


def folder_of(run: Run, step: int) -> Path:
    return Path(run.paths.logs) / "profile" / f"step-{step}"


def recorder(run: Run):
    """Callback that records every log.profile_every-th step; each rank writes its own file."""
    import torch
    from megatron.bridge.training.callbacks import Callback
    from torch.profiler import ProfilerActivity, profile, schedule

    every, rank = run.log.profile_every, int(os.environ["RANK"])
    assert every, "asked for only where steps are recorded"
    recorded = run.world <= FEW or rank in (0, run.world - 1)

    class Recorder(Callback):
        profiler: profile | None = None
        left = 0  # steps until the trace is whole

        def on_train_step_start(self, context) -> None:
            step = context.state.train_state.step + 2  # the one after that which begins
            if recorded and step % every == 0:
                self.profiler, self.left = _profiler(step), 2
                self.profiler.start()

        def on_train_step_end(self, context) -> None:
            if self.profiler:
                torch.cuda.synchronize()  # so that the step's kernels end within it
                self.profiler.step()
                self.left -= 1
                if not self.left:
                    self.profiler.stop()
                    self.profiler = None

        def on_train_end(self, context) -> None:
            if self.profiler:  # the step that was to be recorded never came
                self.profiler.stop()

    def _profiler(step: int) -> profile:
        def save(profiler: profile) -> None:
            file = folder_of(run, step) / TRACE.format(rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.has_gpu() else [])]
        return profile(activities=kinds, schedule=schedule(wait=0, warmup=1, active=1, repeat=1), on_trace_ready=save)

    return Recorder()
