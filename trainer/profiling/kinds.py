"""Kinds of kernels, collectives and calls, by their names; kinds.yaml has the names of kernels."""

import re
from pathlib import Path

import yaml

_KINDS = yaml.safe_load((Path(__file__).parent / "kinds.yaml").read_text())
COLLECTIVES, COPIES = {*_KINDS["collectives"]}, {*_KINDS["copies"]}
OTHER = "other"
_NAMES = [(name, re.compile(text, re.IGNORECASE)) for group in _KINDS.values() for name, text in group.items()]

# Calls in which the host waits until the device has finished.
WAITS = re.compile(r"^cuda(Device|Stream|Event)Synchronize|^cu(Ctx|Stream|Event)Synchronize|^cudaMemcpy$|^cudaFree")
STARTS = re.compile(r"Launch|Memcpy|Memset")  # calls that give the device work

WIDTHS = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Float": 4, "Int": 4, "Long": 8, "Double": 8}
WIDTHS |= {"Float8_e4m3fn": 1, "Float8_e5m2": 1}


def of(name: str) -> str:
    """Kind of a kernel, a copy or a fill."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)
