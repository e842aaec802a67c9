"""Pairs of answers to one prompt, one of them preferred, in the formats of data sets on the Hub.

    prompt, chosen and rejected texts                    one question and two answers
    chosen and rejected as lists of messages, or as one  whole conversations, or answers to a separate prompt
    chosen and rejected texts alone                      the prompt is their common beginning; turns of Anthropic's
                                                         "\\n\\nHuman: ... \\n\\nAssistant: ..." become messages

Both answers must follow the same conversation; otherwise they cannot be compared.
"""

import re
from itertools import takewhile
from typing import Any

from trainer.data.read import messages as conversations
from trainer.data.read.messages import Message, looks_like
from trainer.data.rows import Bad, Refused, Row, show

SIDES = ("chosen", "rejected")
PROMPTS = ("prompt", "question", "instruction", "query", "input")
TURN = re.compile(r"\n\n(Human|Assistant):")


def fits(chosen: object, rejected: object) -> bool:
    """Whether these values can be two answers to a prompt."""
    both = [_listed(answer) for answer in (chosen, rejected)]
    return all(isinstance(answer, str) for answer in both) or all(looks_like(answer, False) for answer in both)


def pair(prompt: Any, chosen: Any, rejected: Any, system: str) -> Row:
    """Return the canonical row. `prompt` is None if the answers contain it."""
    chosen, rejected = _listed(chosen), _listed(rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and not looks_like(chosen, False):
        rows = _of_texts(prompt, chosen, rejected, system)
    else:
        rows = [_conversation(prompt, chosen, "chosen", system), _conversation(prompt, rejected, "rejected", system)]
    if rows[0] == rows[1]:
        raise Refused(Bad("both answers are equal", "rejected", show(rejected)))
    if "messages" in rows[0] and rows[0]["messages"][:-1] != rows[1]["messages"][:-1]:
        raise Refused(Bad("answers to different prompts", "rejected", "conversations differ before their last message"))
    return dict(zip(SIDES, rows, strict=True))


def opens(prompt: Any) -> bool:
    """Whether the value is a conversation that ends with a user's message, so answers can follow it."""
    turns = conversations.read(prompt, "prompt") if looks_like(prompt, False) else []
    return bool(turns) and turns[-1]["role"] == "user"


def _listed(answer: Any) -> Any:
    """Return a single message as a conversation."""
    return [answer] if isinstance(answer, dict) else answer


def _of_texts(prompt: Any, chosen: str, rejected: str, system: str) -> list[Row]:
    if prompt is None and TURN.match(chosen) and TURN.match(rejected):
        return [_checked(_turns(chosen), "chosen"), _checked(_turns(rejected), "rejected")]
    if prompt is None:
        prompt, chosen, rejected = _split(chosen, rejected)
    answers = [
        conversations.text(text, side, "empty answer") for text, side in zip((chosen, rejected), SIDES, strict=True)
    ]
    before, field = _question(prompt), "prompt"
    if not looks_like(prompt, False):
        question, field = before[0]["content"], "chosen"
        if all(answer.startswith(question) for answer in answers):
            answers = [conversations.text(answer[len(question) :], "chosen", "empty answer") for answer in answers]
        if not system.strip():
            return [{"input": question, "output": answer} for answer in answers]
        before = [_new_message("system", system), *before]
    return [_checked([*before, _new_message("assistant", answer)], field) for answer in answers]


def _conversation(prompt: Any, answer: Any, side: str, system: str) -> Row:
    """Return a conversation that ends with the answer. A complete conversation contains its prompt."""
    messages = conversations.read(answer, side)
    if prompt is not None and messages[0]["role"] == "assistant":
        messages = [*_question(prompt), *messages]
    if system.strip() and messages[0]["role"] not in conversations.SYSTEM:
        messages = [_new_message("system", system), *messages]
    return _checked(messages, side)


def _question(prompt: Any) -> list[Message]:
    if looks_like(prompt, False):
        return conversations.read(prompt, "prompt")
    return [_new_message("user", conversations.text(prompt, "prompt", "empty"))]


def _checked(messages: list[Message], field: str) -> Row:
    conversations.check(messages, field)
    return {"messages": messages}


def _new_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns(text: str) -> list[Message]:
    _, *pieces = TURN.split(text)
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [_new_message(conversations.ROLES[name.lower()], content.strip()) for name, content in turns]


def _split(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common prompt of both texts, up to a space, and the rest of each."""
    same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    prompt = "".join(letter for letter, _ in same)
    if not prompt.endswith((" ", "\n")):
        prompt = prompt[: max(prompt.rfind(" "), prompt.rfind("\n")) + 1]
    if not prompt.strip():
        raise Refused(Bad("no prompt", "chosen", "the answers have no common beginning, and no column prompt exists"))
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
