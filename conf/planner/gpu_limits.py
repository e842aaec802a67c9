"""What a kind of GPU cannot do."""

from conf.planner.hardware import Gpu
from conf.rules.precision import CAPABLE, beyond_a_cpu
from conf.schema.run import Run


def unsupported(run: Run, gpu: Gpu) -> list[str]:
    """A line for what this kind of GPU cannot do."""
    found, fp8 = [], run.train.fp8
    able = [name for name, (least, below) in CAPABLE.items() if least <= gpu.capability < below]
    if fp8 and gpu.cuda and "fp8" not in gpu.tflops:
        found.append(f"train.fp8: {fp8}, but {gpu.name} has no FP8; null")
    elif fp8 and gpu.cuda and fp8 not in able:
        found.append(f"train.fp8: {fp8} is nothing that {gpu.name} computes; it takes {', '.join(able) or 'null'}")
    if not gpu.cuda:
        found += [f"{key}: {value} needs a GPU; on a CPU {usual}" for key, value, usual in beyond_a_cpu(run)]
    return found
