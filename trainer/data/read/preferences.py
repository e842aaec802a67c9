"""Pairs of answers to one prompt, of which one is preferred, in the shapes that data sets on the Hub have.

    prompt, chosen and rejected texts                    one question and two answers
    chosen and rejected as lists of messages, or as one  whole conversations, or answers behind a prompt
    chosen and rejected texts alone                      the prompt is what both begin with; turns of Anthropic's
                                                         "\\n\\nHuman: ... \\n\\nAssistant: ..." become messages

Both answers have the same conversation in front of them: what differs there is no comparison of answers.
"""

import re
from itertools import takewhile
from typing import Any

from trainer.data.read import messages as conversations
from trainer.data.read.messages import Message, Unfit
from trainer.data.rows import Bad, Row, show

SIDES = ("chosen", "rejected")
PROMPTS = ("prompt", "question", "instruction", "query", "input")
TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def fits(chosen: object, rejected: object) -> bool:
    """Whether these can be two answers."""
    both = (chosen, rejected)
    return all(isinstance(one, str) for one in both) or all(_is_conversation(one) for one in both)


def pair(prompt: Any, chosen: Any, rejected: Any, system: str) -> Row:
    """The canonical row. `prompt` is None where the answers hold it themselves."""
    chosen, rejected = (_listed(one) for one in (chosen, rejected))
    if isinstance(chosen, str) and isinstance(rejected, str) and not conversations.looks_like(chosen, False):
        found = _of_texts(prompt, chosen, rejected, system)
    else:
        found = [_conversation(prompt, one, side, system) for one, side in zip((chosen, rejected), SIDES, strict=True)]
    if found[0] == found[1]:
        raise Unfit(Bad("both answers are equal", "rejected", show(rejected)))
    if "messages" in found[0] and found[0]["messages"][:-1] != found[1]["messages"][:-1]:
        raise Unfit(Bad("answers to different prompts", "rejected", "conversations differ before their last message"))
    return dict(zip(SIDES, found, strict=True))


def opens(prompt: Any) -> bool:
    """Whether a conversation is what answers stand behind, and does not end with one of them."""
    found = conversations.read(prompt, "prompt") if conversations.looks_like(prompt, False) else []
    return bool(found) and found[-1]["role"] == "user"


def _is_conversation(value: object) -> bool:
    return conversations.looks_like(_listed(value), False)


def _listed(answer: Any) -> Any:
    """A conversation, also where it is a single message."""
    return [answer] if isinstance(answer, dict) else answer


def _of_texts(prompt: Any, chosen: str, rejected: str, system: str) -> list[Row]:
    if prompt is None and all(TURN.match(one) for one in (chosen, rejected)):
        return [_checked(_turns(one), side) for one, side in zip((chosen, rejected), SIDES, strict=True)]
    if prompt is None:
        prompt, chosen, rejected = _split(chosen, rejected)
    answers = [
        conversations.text(one, side, "empty answer") for one, side in zip((chosen, rejected), SIDES, strict=True)
    ]
    if conversations.looks_like(prompt, False):
        before = conversations.read(prompt, "prompt")
        return [_checked([*before, _said("assistant", one)], "prompt") for one in answers]
    question = conversations.text(prompt, "prompt", "empty")
    if all(one.startswith(question) for one in answers):
        answers = [conversations.text(one[len(question) :], "chosen", "empty answer") for one in answers]
    if not system.strip():
        return [{"input": question, "output": one} for one in answers]
    before = [_said("system", system), _said("user", question)]
    return [_checked([*before, _said("assistant", one)], "chosen") for one in answers]


def _conversation(prompt: Any, answer: Any, side: str, system: str) -> Row:
    """A conversation that ends with the answer. One that is whole has its prompt within."""
    found = conversations.read(answer, side)
    if prompt is not None and found[0]["role"] == "assistant":
        found = [*_asked(prompt), *found]
    if system.strip() and found[0]["role"] not in conversations.SYSTEM:
        found = [_said("system", system), *found]
    return _checked(found, side)


def _asked(prompt: Any) -> list[Message]:
    if conversations.looks_like(prompt, False):
        return conversations.read(prompt, "prompt")
    return [_said("user", conversations.text(prompt, "prompt", "empty"))]


def _checked(found: list[Message], field: str) -> Row:
    conversations.check(found, field)
    return {"messages": found}


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns(text: str) -> list[Message]:
    _, *pieces = TURN.split(text)
    return [_said(ROLES[name], said.strip()) for name, said in zip(pieces[::2], pieces[1::2], strict=True)]


def _split(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The prompt that both texts begin with, up to a space, and what is left of each."""
    same = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    prompt = "".join(letter for letter, _ in same)
    if not prompt.endswith((" ", "\n")):
        prompt = prompt[: max(prompt.rfind(" "), prompt.rfind("\n")) + 1]
    if not prompt.strip():
        raise Unfit(Bad("no prompt", "chosen", "both answers begin differently, and there is no column prompt"))
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
