"""Seconds and CPU of a rank's imports: trainer/patches/lazy_bridge.py compared with the unpatched Megatron-Bridge."""

from pathlib import Path

from benchmarks.libraries.turns import medians, python, show

LAZY = """
from trainer.patches import lazy_bridge
from trainer.startup import device
device.start()
"""
AS_IT_IS = """
from trainer.patches import lazy_bridge
lazy_bridge.install = lazy_bridge.load_family = lambda *_: None
from trainer.startup import device
device.start()
"""
REST = """
import sys
import megatron.bridge.training.finetune
import megatron.bridge.training.gpt_step
lazy_bridge.load_family("Glm4MoeForCausalLM")
print(len(sys.modules))
"""


def measure(folder: Path) -> None:
    calls = {"lazily": lambda: python(LAZY + REST), "as it is": lambda: python(AS_IT_IS + REST)}
    print(f"  modules: {python(LAZY + REST)} lazily, {python(AS_IT_IS + REST)} as it is")  # also warms the disk's cache
    show(medians(calls, 3))
