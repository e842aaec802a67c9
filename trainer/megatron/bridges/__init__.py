"""Megatron's part of each model family, in a file with the name of the family's file in conf/families/.

    load(config)      register the bridge of a config.json's family with AutoBridge, with the patches that it needs

A family without a file here uses Megatron-Bridge's own bridge, unpatched. The bridges here are for families that
Megatron-Bridge 0.6 does not convert; remove each when it does. Bugs of its bridges are fixed in
trainer/patches/families/.
"""

import importlib
import importlib.util
from typing import Any

from conf import families
from trainer.patches import families as patches
from trainer.patches import lazy_bridge


def load(config: dict[str, Any]) -> None:
    family = families.of(config)
    name = f"{__name__}.{family.model_type}"
    if family.megatron:
        families.module(family.megatron)
    elif importlib.util.find_spec(name):
        importlib.import_module(name)
    else:
        lazy_bridge.load_family(family.architecture)
    patches.install(family.model_type)
