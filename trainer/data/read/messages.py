"""Conversations in many formats, converted to one: role and content, tool calls as objects, in an order that templates
accept.

Supported formats: role/content and ShareGPT's from/value, with many names for user and assistant; content as a list of
text parts; and each of these as JSON in a string. Tool calls become {"type": "function", "function": {"name",
"arguments"}} with arguments as an object, as transformers needs them. Nulls are removed from tool calls and tools,
because Parquet adds a null to every object that lacks a key of another object.

Rules of the order: a system prompt is the first message or absent. The next message is a user's. Each message of a user
or a tool is answered. An answer follows another answer only if it calls a tool. A tool's message follows a call. The
last message is an answer.
"""

# pyright: reportOptionalMemberAccess=false

import json
import math
from typing import Any

from trainer.data.read.lines import SURROGATE
from trainer.data.rows import Bad, Refused, show

Message = dict[str, Any]
SYSTEM = ("system", "developer")
ROLES = {name: name for name in (*SYSTEM, "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ROLES |= {"function_call": "assistant", "tool_call": "assistant"}
ROLES |= {"function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool"}
CALLS = ("function_call", "tool_call")  # roles whose content is the call
KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")  # further texts that templates use


def looks_like(value: object, sharegpt: bool) -> bool:
    """Whether the value looks like a conversation, even if it is not well-formed."""
    value = _parsed(value)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return ("from" in value[0] and "value" in value[0]) or (not sharegpt and "role" in value[0])


def read(value: object, field: str) -> list[Message]:
    value = _parsed(value)
    if not isinstance(value, list):
        raise Refused(Bad("not a list of messages", field, show(value)))
    if not value:
        raise Refused(Bad("no messages", field, "[]"))
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(value)]


def _message(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise Refused(Bad("message is not an object", field, show(value)))
    names = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    sender, content = value.get(names[0]), value.get(names[1])
    role = ROLES.get(sender.lower()) if isinstance(sender, str) else None
    if role is None:
        raise Refused(Bad("unknown role", f"{field}.{names[0]}", show(sender)))
    if sender.lower() in CALLS:
        return {"role": role, "content": "", "tool_calls": _calls(_json(content, field), f"{field}.{names[1]}")}
    message: Message = {"role": role, "content": _content(content, f"{field}.{names[1]}")}
    for key in KEPT:
        if value.get(key) is not None:
            message[key] = text(value[key], f"{field}.{key}", "")
    if value.get("tool_calls"):
        message["tool_calls"] = _calls(_json(value["tool_calls"], field), f"{field}.tool_calls")
    return message


def _content(value: object, field: str) -> str:
    if isinstance(value, list):
        parts = []
        for number, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise Refused(Bad("not text", f"{field}[{number}]", show(part)))
            parts.append(text(part.get("text"), f"{field}[{number}].text", ""))
        return "".join(parts)
    return "" if value is None else text(value, field, "")


def _calls(value: object, field: str) -> list[dict[str, Any]]:
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list):
        raise Refused(Bad("tool calls are not a list of objects", field, show(value)))
    return [_call(call, f"{field}[{number}]") for number, call in enumerate(calls)]


def _call(value: object, field: str) -> dict[str, Any]:
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Refused(Bad("tool call without a name", field, show(value)))
    arguments = inner.get("arguments", inner.get("parameters"))
    arguments = _json(arguments, field) if arguments not in (None, "") else {}
    if not isinstance(arguments, dict):
        raise Refused(Bad("arguments of a tool call are not an object", f"{field}.arguments", show(arguments)))
    call = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    return clean(call | ({"id": value["id"]} if isinstance(value.get("id"), str) else {}), field)


def tools(value: object, field: str) -> list[dict[str, Any]]:
    parsed = _json(value, field)
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise Refused(Bad("tools are not a list of objects", field, show(value)))
    return clean(parsed, field)


def check(messages: list[Message], field: str) -> None:
    """Check the order of roles, and that no message is empty."""
    if messages and messages[0]["role"] in SYSTEM and not messages[0]["content"].strip():
        del messages[0]  # some data sets have an empty system prompt in every row
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Refused(Bad("no answer", field, ", ".join(message["role"] for message in messages)))
    before: Message | None = None
    for number, message in enumerate(messages):
        role, place = message["role"], f"{field}[{number}]"
        if not _follows(message, before, number):
            after = f"after {before['role']}" if before else "first"
            raise Refused(Bad("wrong role order", f"{place}.role", f"{role} {after}"))
        if not message["content"].strip() and role != "tool" and not message.get("tool_calls"):
            raise Refused(Bad("empty answer" if role == "assistant" else "empty", f"{place}.content", show("")))
        before = message
    if before and before["role"] != "assistant":
        raise Refused(Bad("does not end with an answer", f"{field}[{len(messages) - 1}].role", before["role"]))


def _follows(message: Message, before: Message | None, number: int) -> bool:
    role, previous = message["role"], before["role"] if before else None
    if role in SYSTEM:
        return number == 0
    if role == "user":
        return previous in (None, *SYSTEM, "assistant")
    if role == "tool":
        return previous == "tool" or bool(before and before.get("tool_calls"))
    return previous in ("user", "tool") or (previous == "assistant" and bool(message.get("tool_calls")))


def text(value: object, field: str, empty: str) -> str:
    """Return the value if it is a string that can be written. Refuse an empty one if `empty` gives a reason."""
    if not isinstance(value, str):
        raise Refused(Bad("not text", field, show(value)))
    if not value.isascii() and SURROGATE.search(value):
        raise Refused(Bad("half of a surrogate pair", field, ascii(value[:60])))
    if empty and not value.strip():
        raise Refused(Bad(empty, field, show(value)))
    return value


def _parsed(value: object) -> Any:
    """Return the value of a JSON string, or the value itself if it is something else."""
    try:
        return _json(value, "")
    except Refused:
        return value


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Refused(Bad("not JSON", field, str(error))) from None


def clean(value: Any, field: str, depth: int = 0) -> Any:
    """Return the value without nulls in objects. Refuse values that JSON cannot represent."""
    if depth >= 64 and isinstance(value, dict | list):
        raise Refused(Bad("not JSON", field[:60], "more than 64 levels deep"))
    if isinstance(value, dict):
        pairs = ((text(key, field, ""), inner) for key, inner in value.items() if inner is not None)
        return {key: clean(inner, f"{field}.{key}", depth + 1) for key, inner in pairs}
    if isinstance(value, list):
        return [clean(inner, field, depth + 1) for inner in value]
    if isinstance(value, str):
        return text(value, field, "")
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise Refused(Bad("not JSON", field, f"a {type(value).__name__}"))
