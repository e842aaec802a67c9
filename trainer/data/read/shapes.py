"""Meaning of a source's columns, inferred from their names and from the values of the first rows.

Columns that the configuration names take precedence. Otherwise each reading below is tried: its columns must exist, and
the first rows must have suitable values. Exactly one reading must fit; text alone is used only if nothing else fits.
Other columns are ignored, and the reason lists them.

    messages   messages, conversation or conversations, with role/content or from/value (ShareGPT); or a prompt that is
               a list of messages, with its response, completion or answer, or verl's reward_model.ground_truth
    pairs      the names in PAIRS
    preference chosen and rejected, with or without a prompt column (trainer/data/read/preferences.py); if another
               reading fits too, data.shape must select this one
    text       text or content
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conf.schema.data import Part
from contract.faults import Fault
from trainer.data.read import messages as conversations
from trainer.data.read import preferences
from trainer.data.rows import Bad, Refused, Row

Kind = Literal["pairs", "messages", "text", "preference"]
PAIRS = {  # answers, by the column of their prompt
    "input": ("output",),
    "prompt": ("response", "completion", "answer"),
    "question": ("answer", "response"),
    "query": ("response",),
    "problem": ("solution",),
    "source": ("target",),
    "instruction": ("output", "response"),
}
INPUTS, OUTPUTS = tuple(PAIRS), tuple(dict.fromkeys(itertools.chain(*PAIRS.values())))
MESSAGES = ("messages", "conversation", "conversations")
ANSWERS = (*PAIRS["prompt"], "reward_model.ground_truth")  # of a prompt that is a list of messages
TEXTS = ("text", "content")
NONE = object()


@dataclass(frozen=True)
class Shape:
    """Conversion of a source's rows to canonical rows."""

    kind: Kind
    reason: str
    columns: dict[str, str]  # by use: input, output, context, messages, tools, system, text

    def row(self, raw: Row) -> Row | Bad:
        try:
            if self.kind == "text":
                return {"text": _text(raw, self.columns["text"], "empty")}
            if self.kind == "pairs":
                return _pair(raw, self.columns)
            if self.kind == "preference":
                return _preference(raw, self.columns)
            return _conversation(raw, self.columns)
        except Refused as error:
            bad = error.bad
            return Bad(bad.reason, _printable(bad.field), _printable(bad.shown))


def detect(part: Part, rows: Sequence[Row], place: str) -> Shape:
    names = list(dict.fromkeys(itertools.chain(*rows)))
    if not names:
        raise Fault(f"{place}: no columns: its first rows are empty")
    configured = {key: getattr(part, key) for key in ("input", "output", "messages", "tools", "system", "text")}
    configured = {key: column for key, column in configured.items() if column is not None}
    for key, column in configured.items():
        if not _has(rows, column):
            raise Fault(f"{place}: no column {column} (data.{key}); the columns are {_listed(rows, names)}")
    if part.shape == "preference":
        columns = _only(_readings(rows, part.shape), rows, names, place)
        columns |= {key: column for key, column in configured.items() if key in ("input", "system")}
        reason = "data.shape is preference"
    elif configured.keys() & {"input", "output", "messages", "text"}:
        columns = _completed(configured, rows, names, place)
        reason = "from the configuration"
    else:
        columns = _only(_readings(rows, part.shape), rows, names, place) | configured
        reason = "from the names of the columns"
        if part.shape != "auto":
            reason += f", and data.shape is {part.shape}"
    if "chosen" in columns:
        columns = _with_prompt(columns, names)
    elif columns.keys() & {"messages", "tools", "system"}:
        columns |= {name: name for name in ("tools", "system") if name in names and name not in columns}
    kind = _kind(columns)
    if part.shape not in ("auto", kind, "sharegpt") or (part.shape == "sharegpt" and kind != "messages"):
        raise Fault(f"{place}: data.shape is {part.shape}, but {_described(columns)} makes {kind}")
    used = {*columns.values(), *(column.split(".")[0] for column in columns.values())}
    unused = [name for name in names if name not in used]
    ignored = f"; not used: {', '.join(unused)}" if unused else ""
    return Shape(kind, f"{_described(columns)}: {reason}{ignored}", columns)


def _with_prompt(columns: dict[str, str], names: list[str]) -> dict[str, str]:
    """Add the columns of the prompt and the system prompt, if they exist."""
    prompt = next((name for name in preferences.PROMPTS if name in names), None)
    turns = next((name for name in MESSAGES if name in names), None)
    prompt_columns = {"input": prompt} if prompt else {"messages": turns} if turns else {}
    if prompt == "instruction" and "input" in names and "input" not in columns:  # Alpaca's
        prompt_columns["context"] = "input"
    return prompt_columns | ({"system": "system"} if "system" in names else {}) | columns


def _kind(columns: dict[str, str]) -> Kind:
    if "chosen" in columns:
        return "preference"
    if "text" in columns:
        return "text"
    return "messages" if columns.keys() & {"messages", "tools", "system"} else "pairs"


def _described(columns: dict[str, str]) -> str:
    return ", ".join(f"{column} -> {key}" for key, column in columns.items())


def _completed(configured: dict[str, str], rows: Sequence[Row], names: list[str], place: str) -> dict[str, str]:
    """Complete the configured columns if only one column can be the missing half of a pair."""
    kinds = [keys for keys in ({"text"}, {"messages"}, {"input"}) if keys & configured.keys()]
    if len(kinds) > 1 or ("text" in configured and len(configured) > 1):
        raise Fault(
            f"{place}: {', '.join(f'data.{key}' for key in configured)} cannot be combined: a pair has input and "
            "output, a conversation has messages, and text stands alone"
        )
    if "text" in configured or "messages" in configured:
        return dict(configured)
    for missing, known in (("input", INPUTS), ("output", OUTPUTS)):
        if missing in configured:
            continue
        candidates = [name for name in known if name in names and name not in configured.values()]
        if len(candidates) != 1:
            problem = f"{' and '.join(candidates)} are candidates" if candidates else "no column has a known name"
            raise Fault(f"{place}: data.{missing} is missing: {problem}; the columns are {_listed(rows, names)}")
        configured = configured | {missing: candidates[0]}
    return {key: configured[key] for key in ("input", "output", "tools", "system") if key in configured}


def _readings(rows: Sequence[Row], shape: str) -> list[dict[str, str]]:
    named = [reading for reading in _by_name() if all(_has(rows, column) for column in reading.values())]
    kind = "messages" if shape == "sharegpt" else shape
    named = [_with_context(reading, rows) for reading in named if shape == "auto" or _kind(reading) == kind]
    if any("context" in reading or reading.get("input") == "instruction" for reading in named):
        named = [reading for reading in named if reading.get("input") != "input"]
    fitting = [reading for reading in named if any(_fits(reading, row, shape) for row in rows)]
    # None fits, for example because answers are numbers. Then names decide, and each bad row is reported.
    readings = fitting or [reading for reading in named if not ("messages" in reading and "output" in reading)]
    for last in ("text", "chosen"):
        readings = [reading for reading in readings if last not in reading] or readings
    return readings


def _by_name() -> list[dict[str, str]]:
    readings = [{"messages": name} for name in MESSAGES]
    readings += [{"messages": "prompt", "output": name} for name in ANSWERS]
    readings += [{"input": question, "output": answer} for question, answers in PAIRS.items() for answer in answers]
    readings.append({side: side for side in preferences.SIDES})
    return readings + [{"text": name} for name in TEXTS]


def _with_context(reading: dict[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Add Alpaca's optional input, which is appended to the instruction."""
    if reading.get("input") == "instruction" and _has(rows, "input"):
        return {"input": "instruction", "context": "input", "output": reading["output"]}
    return reading


def _has(rows: Sequence[Row], column: str) -> bool:
    return any(_find(row, column) is not NONE for row in rows)


def _fits(reading: dict[str, str], row: Row, shape: str) -> bool:
    if "chosen" in reading:
        return preferences.fits(*(_find(row, side) for side in preferences.SIDES))
    for key, column in reading.items():
        value = _find(row, column)
        if key == "messages" and not conversations.looks_like(value, shape == "sharegpt"):
            return False
        if key == "output" and "messages" in reading:
            if not (isinstance(value, str) or conversations.looks_like(value, False)):
                return False
        elif key in ("input", "output", "text") and not isinstance(value, str):
            return False
    return True


def _only(readings: list[dict[str, str]], rows: Sequence[Row], names: list[str], place: str) -> dict[str, str]:
    if len(readings) == 1:
        return dict(readings[0])
    advice = "Set data.input and data.output, data.messages, or data.text, or the kind with data.shape"
    if readings:
        could = "; or ".join(_described(reading) for reading in readings)
        raise Fault(
            f"{place}: several readings of the columns fit: {could}. The columns are {_listed(rows, names)}. {advice}"
        )
    raise Fault(f"{place}: no known columns: the columns are {_listed(rows, names)}. {advice}")


def _listed(rows: Sequence[Row], names: list[str]) -> str:
    """Return the columns, each with the kind of its first value."""
    return ", ".join(
        f"{name} ({_type(next((row[name] for row in rows if row.get(name) is not None), None))})" for name in names
    )


def _type(value: object) -> str:
    if isinstance(value, dict):
        return f"object with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list):
        return f"list of {_type(value[0]).split(' ')[0]}s" if value else "list"
    for kind, word in ((str, "text"), (bool, "true or false"), (int, "number"), (float, "number")):
        if isinstance(value, kind):
            return word
    return "null" if value is None else type(value).__name__


def _find(row: Row, column: str) -> Any:
    """Return a column's value by its name, or by a path into objects; NONE if the column does not exist."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            return NONE
        value = value[name]
    return value


def _value(row: Row, column: str) -> Any:
    value = _find(row, column)
    if value is NONE:
        names = ", ".join(map(str, row)) or "none"
        raise Refused(Bad("no such column", column, f"the columns are {names}"))
    return value


def _text(row: Row, column: str, empty: str) -> str:
    return conversations.text(_value(row, column), column, empty)


def _pair(row: Row, columns: dict[str, str]) -> Row:
    question = _with_input(_text(row, columns["input"], "empty"), row, columns)
    return {"input": question, "output": _text(row, columns["output"], "empty answer")}


def _with_input(question: str, row: Row, columns: dict[str, str]) -> str:
    """Append Alpaca's input to the question."""
    context = _optional_text(row, columns, "context")
    return f"{question}\n\n{context}" if context else question


def _preference(row: Row, columns: dict[str, str]) -> Row:
    prompt = _optional(row, columns, "input")
    if "messages" in columns and preferences.opens(turns := _find(row, columns["messages"])):
        prompt = turns
    if isinstance(prompt, str):
        prompt = _with_input(prompt, row, columns)
    chosen, rejected = (_value(row, columns[side]) for side in preferences.SIDES)
    return preferences.pair(prompt, chosen, rejected, _optional_text(row, columns, "system"))


def _conversation(row: Row, columns: dict[str, str]) -> Row:
    if "messages" in columns:
        column = columns["messages"]
        turns = conversations.read(_value(row, column), column)
        if "output" in columns:
            turns = [*turns, *_reply(_value(row, columns["output"]), columns["output"])]
    else:
        pair = _pair(row, columns)
        column = columns["input"]
        turns = [{"role": "user", "content": pair["input"]}, {"role": "assistant", "content": pair["output"]}]
    if turns[0]["role"] not in conversations.SYSTEM and (system := _optional_text(row, columns, "system")).strip():
        turns = [{"role": "system", "content": system}, *turns]
    conversations.check(turns, column)
    tools = _optional(row, columns, "tools")
    tools = conversations.tools(tools, columns["tools"]) if tools not in (None, "") else []
    return {"messages": turns} | ({"tools": tools} if tools else {})


def _optional_text(row: Row, columns: dict[str, str], use: str) -> str:
    value = _optional(row, columns, use)
    return "" if value is None else conversations.text(value, columns[use], "")


def _optional(row: Row, columns: dict[str, str], use: str) -> Any:
    """Return the value of a column that may be missing; None then."""
    value = _find(row, columns[use]) if use in columns else None
    return None if value is NONE else value


def _reply(value: Any, column: str) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return conversations.read(value, column)
    return [{"role": "assistant", "content": conversations.text(value, column, "empty answer")}]


def _printable(text: str) -> str:
    """Return the text with halves of surrogate pairs as escapes, because reports cannot store them."""
    return text.encode(errors="backslashreplace").decode()
