"""Readings of traps, and seconds for a configuration of 100 KB: conf/strict_yaml.py compared with ruamel.yaml."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from benchmarks.libraries.turns import medians, show
from conf import strict_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
TRAPS = {
    "duplicate key": "lr: 1\nsteps: 2\nlr: 3\n",
    "two duplicates": "lr: 1\nlr: 2\nsteps: 3\nsteps: 4\n",
    "merge key": "base: &b {lr: 1}\nrun: {<<: *b}\n",
    "no": "key: no\n",
    "1e-4": "key: 1e-4\n",
    "010": "key: 010\n",
    "0x10": "key: 0x10\n",
    "1_000": "key: 1_000\n",
    "12:30:45": "key: 12:30:45\n",
    "2026-11-22": "key: 2026-11-22\n",
    ".nan": "key: .nan\n",
    "5000 digits": f"key: {'9' * 5000}\n",
    "unknown tag": "key: !thing 1\n",
    "python tag": "key: !!python/object:os.system {}\n",
    "alias bomb": BOMB,
    "tab": "a:\n\tb: 1\n",
    "list as key": "? [1, 2]\n: 3\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "%YAML 1.1, no": "%YAML 1.1\n---\nkey: no\n",
}


def measure(folder: Path) -> None:
    print(f"  {'':16}{'ours':60}ruamel.yaml, typ=safe, pure")
    for name, text in TRAPS.items():
        print(f"  {name:16}{_ours(text):60}{_ruamel(text)}")
    text = "".join(f"section{k}:\n  lr: 1e-4\n  name: some text\n  list: [1, 2.5, true]\n" for k in range(1600))
    print(f"  {len(text) / 1000:.0f} KB:")
    calls = {
        "ours": lambda: strict_yaml.parse(text, "conf.yaml"),
        "ruamel.yaml, pure: YAML 1.2": lambda: YAML(typ="safe", pure=True).load(text),
        "ruamel.yaml, C: YAML 1.1": lambda: YAML(typ="safe").load(text),
    }
    show(medians(calls, 5))


def _ours(text: str) -> str:
    value, wrong = strict_yaml.parse(text, "conf.yaml")
    return "; ".join(f"refused: {line}" for line in wrong)[:58] if wrong else _short(value)


def _ruamel(text: str) -> str:
    try:
        return _short(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, ValueError, TypeError) as error:
        return f"refused in {len(str(error).splitlines())} lines: {type(error).__name__}"


def _short(value: Any) -> str:
    if isinstance(value, dict) and [*value] == ["key"]:
        value = value["key"]
        return f"{type(value).__name__} {str(value)[:30]}" if _printable(value) else "int of thousands of digits"
    return f"{type(value).__name__} {'of lists in lists' if 'h' in value else value}"


def _printable(value: Any) -> bool:
    return not isinstance(value, int) or value < 10**100
