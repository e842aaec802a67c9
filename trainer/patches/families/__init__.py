"""Patches for model families. A module with the name of a model_type patches transformers for this family.

install(model_type)      apply the family's patch, if it exists
install_for(folder)      apply the patch for the model in a folder
"""

import importlib
import importlib.util
from pathlib import Path

from conf import families
from conf.model_files import config_json


def install(model_type: object) -> None:
    name = f"{__name__}.{model_type}"
    if model_type in families.every() and importlib.util.find_spec(name):
        importlib.import_module(name).install()


def install_for(folder: Path) -> None:
    if (folder / config_json.NAME).is_file():
        install(config_json.read(folder / config_json.NAME).get("model_type"))
