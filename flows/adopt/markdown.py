"""Reader of pages: code blocks, and the values that known guides give in tables and lists."""

import re
from collections.abc import Iterator
from typing import Any

from flows.adopt import python_calls, shell_commands, yaml_keys
from flows.adopt.stack import Source
from flows.adopt.stacks.documents import GUIDES

BLOCK = re.compile(r"^([ \t]*)```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^\s*[-*] \**([A-Z][\w ./()-]{1,40}?)\**:\**\s+(\S.{0,60})$")
EQUAL = re.compile(r"(?<![\w-])((?:[a-z]+-[a-z-]+)(?:=[a-z]+-[a-z-]+)*)=(\d+)\b")  # micro-batch-size=32 in a sentence
SPOKEN = re.compile(r"`(--\w+) (\w+)`")  # an option in a sentence
OPTION = re.compile(r"^\s*(--[\w-]+) (\S+)")
VALUE = re.compile(r"\d|^(?:true|false|full|flash|disabled|uniform)|^lr/")
LONGEST = 60  # characters of a value in a table; longer ones are sentences


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the code blocks of a page, each with its line."""
    found = []
    for match in BLOCK.finditer(text):
        body = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
        found.append((text.count("\n", 0, match.start()) + 2, body))
    return found


def guides(text: str) -> list[Source]:
    """Return the trainings of a known guide."""
    title = next((line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#")), "")
    found = []
    for guide in GUIDES:
        if title != guide.title:
            continue
        begin = text.find(guide.begin)
        if begin < 0:
            continue
        end = text.find(guide.end, begin + len(guide.begin) + 1) if guide.end else len(text)
        keys: dict[str, Any] = {}
        for key, value in _values(text[begin : end if end > 0 else len(text)]):
            keys[key if key not in keys else f"{key} (again, {len(keys)})"] = value
        found.append(Source("document", keys, guide.preset, (guide.title, guide.preset)))
    return found


def _values(text: str) -> Iterator[tuple[str, Any]]:
    for _, block in blocks(text):
        yield from _of_block(block)
    yield from ((match[1], match[2]) for match in SPOKEN.finditer(text))
    for match in EQUAL.finditer(text):
        yield from ((name, match[2]) for name in match[1].split("="))
    for line in BLOCK.sub("", text).splitlines():
        if match := ITEM.match(line):
            yield match[1].strip(), match[2].strip().strip("`")
        elif line.startswith("|"):
            cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
            if len(cells) > 1 and len(cells[1]) <= LONGEST and VALUE.search(cells[1]):
                yield cells[0], cells[1]


def _of_block(block: str) -> Iterator[tuple[str, Any]]:
    if match := OPTION.match(block):
        yield match[1], match[2]
    elif called := python_calls.calls(block):
        yield from called.items()
    elif source := yaml_keys.source(block, "the guide"):
        yield from source.keys.items()
    else:
        yield from re.findall(r"^([A-Z_]+)=(\w+) ", block, re.MULTILINE)
        for command in shell_commands.sources(block):
            head = f"{command.words[0]} --" if command.words else ""
            yield from ((head + key, value) for key, value in command.keys.items())
