"""benchmarks/gpu/whole_flow.py: the stages of a flow are seen by their guards, and one that never was is a fault."""

import subprocess
import sys

from benchmarks.gpu import whole_flow
from tests.support.flow_world import ROOT, wait_for


def test_a_stage_is_seen_while_its_guard_runs(tmp_path):
    (tmp_path / "resolved.yaml").write_text(f"paths: {{parity: {tmp_path}/none.json}}\n")
    command = [
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
        "-m",
        "trainer.evaluate",
        f"{tmp_path}/resolved.yaml",
    ]
    guard = [sys.executable, "-m", "tasks.run.guard", *command]
    with subprocess.Popen(guard, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        assert wait_for(lambda: [*whole_flow.stages_running(tmp_path)], 20) == ["evaluate-base"]
        assert not [*whole_flow.stages_running(tmp_path / "other")]
        running.stdin.close()
    assert not [*whole_flow.stages_running(tmp_path)]


def test_a_stage_that_was_never_seen_is_a_fault(tmp_path):
    said = "\n".join(f"{name} Completed 1.0 s x" for name in whole_flow.STAGES)
    samples = whole_flow.Samples(tmp_path / "memory.csv", tmp_path, 0.0, gpu=True)
    samples.rows = [(0.0, 1, ("convert",)), (1.0, 1, ("evaluate-base",)), (2.0, 1, ("train",))]
    wrong = whole_flow.judge(0, said, samples)[1]
    assert "evaluate-tuned: was never seen to run, so nothing is known of what ran beside it" in wrong
    assert not [line for line in wrong if line.startswith("train")]
