"""Strict reader of YAML 1.2: it reports duplicate keys, merges nothing, and creates no objects."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from contract import regular_files
from contract.faults import ConfigError, Fault

LARGEST = 2**18  # bytes of a configuration, which take 2 s to parse
MANY = 20  # lines about duplicate keys
UNFIT = (ValueError, KeyError, AttributeError, TypeError, IndexError, ArithmeticError)
RESOLVERS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]{0,99})",  # Python refuses to read thousands of digits
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
}


class Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[int, str, int]] = []  # line, key, line of its first occurrence

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in first:
                self.duplicates.append((line, key.value, first[key.value]))
            elif isinstance(key, yaml.ScalarNode):
                first[key.value] = line
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Treat merge keys, which YAML 1.2 no longer has, as unknown tags: nested merges would grow without limit."""


class Dumper(yaml.SafeDumper):
    """Dumper that quotes texts which Loader would misread."""


Loader.yaml_implicit_resolvers = {}
for _name, _pattern in RESOLVERS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), None)
Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def read_text(file: Path, shown: str) -> str:
    try:
        return regular_files.read(file, LARGEST).decode("utf-8")
    except Fault as fault:
        raise ConfigError(str(fault).replace(str(file), shown, 1)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: {error}") from None


def parse(text: str, shown: str) -> tuple[Any, list[str]]:
    """Parse a YAML text. Returns its value and the problems."""
    try:
        loader = Loader(text)
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return None, [f"{shown}{line}: {', '.join(filter(None, (error.context, error.problem)))}"]
    except (yaml.YAMLError, RecursionError, *UNFIT) as error:
        return None, [f"{shown}: not YAML: {error}"]
    return value, [
        f"{shown}:{line}: {key}: again; first on line {first}" for line, key, first in loader.duplicates[:MANY]
    ]


def dump(value: Any) -> str:
    """The value as YAML that parse() reads back."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False)


def table(name: str) -> Any:
    """The content of conf/tables/NAME.yaml."""
    file = Path(__file__).parent / "tables" / f"{name}.yaml"
    value, wrong = parse(read_text(file, file.name), file.name)
    assert not wrong, wrong
    return value
