"""Facts of the models in conf/models, by name."""

import json
from functools import cache

from conf.model_facts import MODELS, ModelFacts, facts_from_hf


@cache
def known(name: str) -> ModelFacts:
    path = MODELS / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in MODELS.glob("*.json")))
        raise ValueError(f"{name}: no such model in conf/models; there are {names}")
    return facts_from_hf(json.loads(path.read_text())["config"])
