"""Read a file, and find the stack and the part of it that is a training configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from contract import regular_files
from contract.faults import ConfigError
from flows.adopt import markdown, python_calls, shell_commands, yaml_keys
from flows.adopt.registry import STACKS
from flows.adopt.stack import Source, Stack

LARGEST = 2**18  # bytes of a file


def read(path: Path) -> str:
    content = regular_files.read(path, LARGEST)
    if b"\0" in content:
        raise ConfigError(f"{path}: a binary file; it takes text: YAML, JSON, a script or a page")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def sources(text: str, shown: str) -> list[Source]:
    """Return all parts of a text that may be configurations, by what its content is."""
    if found := markdown.guides(text):
        return found
    blocks = markdown.blocks(text)
    if blocks:
        parts = [replace(part, place=f"line {line}") for line, block in blocks for part in sources(block, shown)]
        return parts
    if (found := python_calls.sources(text)) is not None:
        usage = python_calls.usage(text)
        return found + ([replace(part, place="the docstring") for part in sources(usage, shown)] if usage else [])
    if found := yaml_keys.source(text, shown):
        return [found]
    return shell_commands.sources(text)


def choose(parts: Sequence[Source], stack: str | None, pick: int | None) -> list[tuple[Stack, Source]]:
    """Return the parts that a stack recognises, the clearest first. `stack` forces one; `pick` selects a part."""
    if stack is not None:
        found = [(parts_score(STACKS[stack], part), part) for part in parts if part.kind in STACKS[stack].kinds]
        ranked = sorted(found, key=lambda pair: -pair[0])
        chosen = [(STACKS[stack], part) for _, part in ranked]
    else:
        scored = [
            (one.recognises(part), one, part) for part in parts for one in STACKS.values() if part.kind in one.kinds
        ]
        best: dict[int, tuple[int, Stack, Source]] = {}
        for score, one, part in scored:
            if score > 0 and score > best.get(id(part), (0,))[0]:
                best[id(part)] = (score, one, part)
        chosen = [(one, part) for _, one, part in sorted(best.values(), key=lambda found: -found[0])]
    if pick is not None:
        if not 1 <= pick <= len(chosen):
            raise ConfigError(f"--pick: {pick}: the file has {len(chosen)} configurations")
        return [chosen[pick - 1]]
    return chosen


def parts_score(stack: Stack, part: Source) -> int:
    return stack.recognises(part) * 1000 + sum(stack.spelled(key) in stack.keys for key in part.keys)
