"""The loss of each objective: a module with step(run), which returns the forward_step for Megatron-Bridge's loop."""

import importlib
from typing import Any

from conf.rules import objectives
from conf.schema.run import Run


def step(run: Run) -> Any:
    return importlib.import_module(objectives.of(run).forward).step(run)
