"""Recording of whole steps with torch's profiler, as a callback of Megatron-Bridge's loop.

The step before a recorded step is also profiled, and its trace is dropped, because starting the profiler takes time.
Stacks and shapes are not recorded, because this would take more of the host's time than the recorded work.
"""

# pyright: reportArgumentType=false

import os
from pathlib import Path

from conf.schema.run import Run
from trainer.profiling.report import TRACE
from trainer.startup import device

FEW = 8  # up to this number, all ranks are recorded and equally delayed; with more, only the first and the last


def folder_of(run: Run, step: int) -> Path:
    return Path(run.paths.logs) / "profile" / f"step-{step}"


def recorder(run: Run):
    """Callback that records every log.profile_every-th step; each rank writes its own file."""
    import torch
    from megatron.bridge.training.callbacks import Callback
    from torch.profiler import ProfilerActivity, profile, schedule

    every, rank = run.log.profile_every, int(os.environ["RANK"])
    assert every, "only called if steps are recorded"
    recorded = run.world <= FEW or rank in (0, run.world - 1)

    class Recorder(Callback):
        profiler: profile | None = None
        steps_left = 0  # until the trace is complete

        def on_train_step_start(self, context) -> None:
            step = context.state.train_state.step + 2  # the step after the one that starts now
            if recorded and step % every == 0:
                self.profiler, self.steps_left = _profiler(step), 2
                self.profiler.start()

        def on_train_step_end(self, context) -> None:
            if self.profiler:
                torch.cuda.synchronize()  # the step's kernels must end within the step
                self.profiler.step()
                self.steps_left -= 1
                if not self.steps_left:
                    self.profiler.stop()
                    self.profiler = None

        def on_train_end(self, context) -> None:
            if self.profiler:  # training ends before the step to record
                self.profiler.stop()

    def _profiler(step: int) -> profile:
        def save(profiler: profile) -> None:
            file = folder_of(run, step) / TRACE.format(rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.has_gpu() else [])]
        return profile(activities=kinds, schedule=schedule(wait=0, warmup=1, active=1, repeat=1), on_trace_ready=save)

    return Recorder()
