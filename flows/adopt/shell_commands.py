"""Reader of shell scripts: the commands with their variables replaced. Nothing is run.

It knows line continuations, comments, X=..., export X=..., ${X:-default}, and arrays. A command in $(...) is not known,
so its text stays.
"""

import re
import shlex
from typing import Any

from flows.adopt.stack import Source

KEYWORDS = {"then", "do", "else", "time", "exec", "nohup", "sudo", "set", "-x", "{", "("}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
OUTPUT = re.compile(r"\d?>")  # >log, 2>&1
FILE_NEXT = re.compile(r"\d?>>?|<")
VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\]|\[\*\])?(?::?([-+=])([^{}]*))?\}|\$(\w+)")
ARRAY = re.compile(r"\s*(?:export |declare -a )?\w+\+?=\(")
MARK = re.compile(r"\\.|['\"()]")
HERE = {"HOME": "~", "PWD": "."}  # variables with known values
DEEPEST = 8  # variables in values of variables
LAUNCHERS = re.compile(r"^--?(nproc[-_]per[-_]node|nnodes|num[-_]processes|num[-_]machines|num[-_]gpus)(?:=(.*))?$")
LARGEST = 200_000  # characters of a variable's value


def sources(text: str) -> list[Source]:
    """Return each command with options, in the order of the script."""
    variables = {**HERE}
    used: set[str] = set(HERE)
    found: list[Source] = []
    for number, line in _logical_lines(text):
        for part in _split(line):
            words = _words(part, variables, used)
            while words and (words[0] in KEYWORDS or words[0] in ("export", "declare", "local", "readonly")):
                words = words[1:]
            here: dict[str, str] = {}
            while words and (match := ASSIGNMENT.fullmatch(words[0])):
                name, more, value = match.groups()
                here[name] = f"{variables.get(name, '')} {value}".strip() if more else value
                words = words[1:]
            if not words:
                variables |= {name: value[:LARGEST] for name, value in here.items()}
                continue
            if source := _command(words, number):
                source.environment = {**variables, **here}
                found.append(source)
    for source in found:
        source.environment = {name: value for name, value in source.environment.items() if name not in used}
    return found


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Join continued lines, open quotes and arrays. Comments are removed, also those between continued lines."""
    lines: list[tuple[int, str]] = []
    pending, start, end, marks = list[str](), 0, "", _Marks()
    for number, line in enumerate(text.splitlines(), 1):
        if end:  # inside a here document
            end = "" if line.strip() == end else end
            continue
        if line.strip().startswith("#") and not marks.are_open:
            continue
        if match := re.search(r"<<-?\s*['\"]?(\w+)", line):
            end = match[1]
        start = start if pending else number
        pending += ["\n"] * marks.are_open + [part := _without_comment(line.rstrip())]
        marks.read(part)
        if part.endswith("\\"):
            pending[-1] = part[:-1] + " "
        elif not marks.are_open:
            lines.append((start, "".join(pending)))
            pending, marks = [], _Marks()
    return [*lines, (start, "".join(pending))] if pending else lines


class _Marks:
    """Open quotes, and open parentheses of an array, after some lines."""

    def __init__(self) -> None:
        self.quote, self.depth, self.is_array = "", 0, False
        self._first = True

    @property
    def are_open(self) -> bool:
        return bool(self.quote) or (self.is_array and self.depth > 0)

    def read(self, line: str) -> None:
        self.is_array = self.is_array or (self._first and bool(ARRAY.match(line)))
        self._first = False
        for mark in MARK.findall(line):
            if self.quote:
                self.quote = "" if mark in (self.quote, f"\\{self.quote}" * (self.quote == "'")) else self.quote
            elif mark in "'\"":
                self.quote = mark
            else:
                self.depth += (mark == "(") - (mark == ")")


def _without_comment(line: str) -> str:
    match = re.match(r"((?:[^'\"#\\]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?<=\S)#)*)\s#", line)
    return match[1] if match else line


def _split(line: str) -> list[str]:
    """Split a line at ; && || | and &, but not in quotes or in $(...)."""
    pattern = r"(?:\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\$\([^()]*\)|[<>]&|[^;&|])+"
    return [part for part in re.findall(pattern, line, flags=re.DOTALL) if part.strip()]


def _words(text: str, variables: dict[str, str], used: set[str]) -> list[str]:
    array = re.fullmatch(r"\s*(?:export |declare -a )?(\w+)(\+?)=\((.*)\)\s*", text, flags=re.DOTALL)
    if array:
        items = " ".join(shlex.quote(word) for word in _words(array[3], variables, used))
        return [f"{array[1]}{array[2]}={items}"]

    def computed(match: re.Match[str]) -> str:
        text = re.sub(r"[${}]", "", match[1] or match[2])
        used.update(name for name in re.findall(r"[A-Za-z_]\w*", text) if name in variables)
        product = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), text)
        return _computed(product) or "".join(match[0].split())

    text = re.sub(r"\$\(\(([^()]*)\)\)|\$\(expr ([^()]*)\)", computed, text)
    text = re.sub(r"(?<!\")\$\(([^()]+)\)(?!\")", lambda match: "".join(match[0].split()), text)
    found: list[str] = []
    for word in _lexed(text):
        replaced = _replaced(word, variables, used)
        whole = VARIABLE.fullmatch(word.strip('"'))
        if whole and replaced != word and (" " in replaced or "[@]" in word or not replaced):
            found += _lexed(replaced)
        else:
            found.append(replaced)
    return found


def _lexed(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _replaced(word: str, variables: dict[str, str], used: set[str], depth: int = 0) -> str:
    def value(match: re.Match[str]) -> str:
        name, sign, default = match[1] or match[4], match[2], match[3]
        used.add(name)
        if sign == "+":
            return (default or "") if name in variables else ""
        return variables[name] if name in variables else default if sign else match[0]

    replaced = VARIABLE.sub(value, word)[:LARGEST]
    if depth < DEEPEST and replaced != word and "$" in replaced:
        replaced = _replaced(replaced, variables, used, depth + 1)
    return replaced


def _computed(text: str) -> str | None:
    """Return the result of a product or quotient of integers."""
    if not re.fullmatch(r"\s*\d{1,9}(\s*[*/]\s*\d{1,9}){0,9}\s*", text):
        return None
    numbers, signs = [int(one) for one in re.findall(r"\d+", text)], re.findall(r"[*/]", text)
    result = numbers[0]
    for sign, one in zip(signs, numbers[1:], strict=True):
        if sign == "/" and not one:
            return None
        result = result * one if sign == "*" else result // one
    return str(result)


def _command(words: list[str], number: int) -> Source | None:
    """Return a command with at least one option or override, else None."""
    head: list[str] = []
    keys: dict[str, Any] = {}
    notes: list[str] = []
    words = [part for word in words for part in (word.split() if re.match(r"--[\w-]+ ", word) else [word])]
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("<") or OUTPUT.match(word):
            place += bool(FILE_NEXT.fullmatch(word))
            continue
        if (override := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*(?:\.[\w@/-]+)*)=(.*)", word, re.DOTALL)) and (
            not word.startswith("-")
        ):
            _put(keys, override[1], _unquoted(override[2]), notes)
        elif (word.startswith("--") and len(word) > 2) or re.fullmatch(r"-[a-zA-Z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
            while not equals and place < len(words) and not (_is_option(words[place]) or OUTPUT.match(words[place])):
                if word == "-m" and values:
                    break
                values.append(words[place])
                place += 1
            if word == "-m" or name in ("module",):
                head += values
            elif _is_script(values):  # --standalone train.py
                cut = next(i for i, one in enumerate(values) if _is_script([one]))
                _put(keys, name, _value(values[:cut]), notes)
                head += values[cut:]
            else:
                _put(keys, name, _value(values), notes)
        else:
            head.append(word)
    return Source("command", keys, f"line {number}", tuple(head), notes=notes) if keys or len(head) > 2 else None


def _put(keys: dict[str, Any], name: str, value: Any, notes: list[str]) -> None:
    if name in keys and keys[name] != value:
        notes.append(f"{name}: set twice; the last value counts")
    keys[name] = value


def _is_option(word: str) -> bool:
    return (
        bool(re.match(r"--?[A-Za-z]", word))
        or bool(re.match(r"\+{0,2}[A-Za-z_]\w*\.[\w.]+=", word))
        or word[:1] in "<>"
    )


def _is_script(values: list[str]) -> bool:
    return any(value.endswith(".py") for value in values)


def _value(values: list[str]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values


def _unquoted(text: str) -> Any:
    """Return the value of a hydra override: a text without its quotes, a list, or None."""
    text = text.strip()
    if text in ("null", "None"):
        return None
    if text.startswith("[") and text.endswith("]"):
        return [part.strip().strip("'\"") for part in text[1:-1].split(",") if part.strip()]
    return text.strip("'\"")
