"""The peak that `mfu` is computed from, in metrics.jsonl is that of the planner's table, for every GPU in it."""

import pytest

from conf.planner.hardware import GPUS
from trainer.training import metrics


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_the_peak_of_a_device_is_the_planners(device, name):
    assert metrics._peak(device) == GPUS[name].tflops["bf16"]


def test_a_cpu_has_no_peak():
    assert metrics._peak("cpu") is None
