"""Reader of YAML and JSON: the leaves of a file by dotted key. No objects are created."""

from collections.abc import Iterator
from typing import Any

import yaml

from contract.faults import ConfigError
from flows.adopt.stack import Source

MANY = 5000  # leaves of a configuration; anchors can multiply them
DEEPEST = 30  # mappings in mappings


class Loader(yaml.CSafeLoader):
    """Safe reader of YAML 1.1, which the other stacks use, with a list of keys that a mapping has twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        self.twice += sorted({name for name in names if names.count(name) > 1 and name != "<<"})
        return super().construct_mapping(node, deep)


def source(text: str, place: str) -> Source | None:
    """Return the keys of a text that is a YAML mapping, else None. Raises ConfigError for tags that create objects."""
    try:
        loader = Loader(text)
        value = loader.get_single_data()
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{place}: {error.problem or error}; objects in YAML are not created") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        return None
    keys: dict[str, Any] = {}
    for key, leaf in _leaves(value, "", place, 0):
        keys[key] = leaf
        if len(keys) > MANY:
            raise ConfigError(f"{place}: more than {MANY} values; this is not a configuration")
    return Source("yaml", keys, place, notes=[f"{name}: set twice; the last value counts" for name in loader.twice])


def _leaves(value: Any, key: str, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        raise ConfigError(f"{place}: {key[:80]}: more than {DEEPEST} mappings in mappings")
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name), place, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]", place, depth + 1)
    else:
        yield key, value
