"""Templates, which convert rows to text and tokens: data.template, chosen once per run, and also used by evaluation.

    plain    a text with {input} and {output}, like Megatron-Bridge's prompt-completion rows (plain.py)
    chat     the tokenizer's chat template, or a Jinja file that uses `messages` (chat.py)
    jinja    a Jinja file that uses `input` and `output` (chat.py)
    text     documents for pretraining, each followed by the end of text (plain.py)

The record has the template's text, its arguments and the tokenizer's identity. Evaluation therefore does not read a
template file that may have changed since. Templates that write the date (strftime_now) are rendered with the current
date.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema.data import PLAIN, Data
from contract import checksums, regular_files
from contract.faults import Fault
from trainer.data.rows import Bad, Row
from trainer.data.tokens import chat, plain, rendering
from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.template_text import Encoded, Kind, TemplateText
from trainer.startup.limited_calls import Exceeded

DEFAULT = "{input} {output}"
CHAT = "chat template"
# Attributes in a template's record.
RECORDED = ("kind", "text", "origin", "loss_on", "stop", "options", "seq_length", "packed", "too_long")
RESERVED = {"messages", "tools", "documents", "input", "output", "conversations", "chat_template"} | {
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}


@dataclass(frozen=True)
class Template(TemplateText):
    """A template that encodes rows."""

    def __post_init__(self) -> None:
        if self.kind in ("chat", "jinja"):
            rendering.start()

    def encode(self, rows: Sequence[Row]) -> list[Encoded | Bad]:
        if not rows or "chosen" not in rows[0]:
            return self._encode(rows)
        sides = [self._encode([row[side] for row in rows]) for side in ("chosen", "rejected")]
        return [_joined(*both) for both in zip(*sides, strict=True)]

    def _encode(self, rows: Sequence[Row]) -> list[Encoded | Bad]:
        if self.kind == "text":
            return plain.encode_text(self, rows)
        if self.kind == "chat":
            return chat.encode(self, rows)
        encoder = plain if self.kind == "plain" else chat
        return encoder.encode(self, [_pair(self, row) for row in rows])

    def line(self, row: Row) -> Row:
        """Return the row for training.jsonl. For two answers it is the chosen one's, plus the rejected one's text."""
        if "chosen" in row:
            return self.line(row["chosen"]) | {"rejected": self.reference(row["rejected"])}
        if self.kind == "text":
            return {"text": row["text"]}
        if self.kind == "chat":
            return {"messages": chat.conversation(row)} | ({"tools": row["tools"]} if row.get("tools") else {})
        pair = _pair(self, row)
        assert not isinstance(pair, Bad), pair  # encode() has refused it
        return {"input": pair["input"], "output": pair["output"]}

    def prompt(self, line: Row) -> str:
        """Return the prompt for a model: the text before the last answer."""
        return plain.prompt(self, line) if self.kind == "plain" else chat.prompt_and_answer(self, line)[0]

    def answer(self, line: Row) -> str:
        """Return the text of the last answer with its stop, as in training."""
        if self.kind == "plain":
            return plain.answer(self, line) + self.stop
        return chat.prompt_and_answer(self, line)[1]

    def reference(self, line: Row) -> str:
        """Return the last answer without its stop."""
        return line["output"] if "output" in line else line["messages"][-1].get("content") or ""

    def tokens(self, line: Row) -> tuple[list[int], list[int]]:
        """Return the tokens of prompt and answer as in training, cut in the same way."""
        (encoded,) = self.encode([line])
        if isinstance(encoded, Bad):
            raise Fault(f"{encoded.reason}: {encoded.field} {encoded.shown}")
        ids = encoded.ids.tolist()
        end = int(np.flatnonzero(encoded.learned)[-1]) + 1  # a line break after the end of a turn may not be learned
        return ids[: encoded.start], ids[encoded.start : end]

    def record(self) -> dict[str, Any]:
        """Return the record for from_record(), as JSON."""
        digest = checksums.of(self.text) if isinstance(self.text, str) else checksums.of_json(self.text)
        settings = {key: getattr(self, key) for key in RECORDED}
        return settings | {"sha256": digest, "tokenizer": tokenizers.facts(self.tokenizer)}


def choose(data: Data, tokenizer: tokenizers.Tokenizer, kind: str) -> Template:
    """Return the template for rows of a kind: pairs, messages or text."""
    taken = sorted(RESERVED & data.template_options.keys())
    if taken:
        raise Fault(f"data.template_options: {', '.join(taken)}: reserved; every template gets these; use other names")
    template, text, origin = _text(data, tokenizer, kind)
    if template in ("chat", "jinja") and not tokenizer.is_fast:
        raise Fault(
            f"{tokenizer.name_or_path}: a tokenizer without tokenizer.json cannot locate answers; use a text "
            'such as data.template: "{input} {output}"'
        )
    stop = data.stop
    if stop is None:
        stop = "" if template == "chat" and not origin.endswith(".jinja") else _end(tokenizer)
    lengths = data.seq_length, data.packed, data.too_long
    return Template(template, text, origin, data.loss_on, stop, data.template_options, *lengths, tokenizer)


def _text(data: Data, tokenizer: tokenizers.Tokenizer, kind: str) -> tuple[Kind, Any, str]:
    """Return the kind, the text and the origin of the template for rows of a kind."""
    name, folder = data.template, tokenizer.name_or_path
    if kind == "text":
        if name != "auto":
            raise Fault(f"data.template: {name}: the rows are texts without a prompt; remove this key")
        return "text", "", "text"
    if re.fullmatch(PLAIN, name, re.DOTALL):
        return "plain", name, "data.template"
    if name.endswith(".jinja"):
        return _file(name)
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise Fault(
            f"{folder}: its chat templates are {', '.join(templates)}, without a default; "
            "data.template: NAME.jinja uses a file"
        )
    if templates:
        return "chat", templates, CHAT
    advice = f'{folder}: the tokenizer has no chat template; use data.template: "{DEFAULT}", or a file NAME.jinja'
    if name == "chat":
        raise Fault(f"data.template: chat: {advice}")
    return "plain", DEFAULT, "no chat template"


def _end(tokenizer: tokenizers.Tokenizer) -> str:
    if not tokenizer.eos_token:
        raise Fault(
            f"{tokenizer.name_or_path}: no end of text (eos_token); set data.stop to the text that ends an answer"
        )
    return tokenizer.eos_token


def _file(name: str) -> tuple[Kind, str, str]:
    try:
        text = regular_files.read(Path(name)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(f"data.template: {name}: not UTF-8 at byte {error.start}") from None
    except Fault as fault:
        raise Fault(f"data.template: {fault}, in {Path.cwd()}") from None
    try:
        used = rendering.variables(text)
    except rendering.Refused as error:
        raise Fault(f"data.template: {name}: {error}") from None
    except Exceeded as error:
        raise Fault(f"data.template: {name}: it {error}; fix it") from None
    if "messages" in used:
        return "chat", text, name
    if {"input", "output"} <= used:
        return "jinja", text, name
    raise Fault(
        f"data.template: {name}: uses neither messages nor input and output; "
        f"it uses {', '.join(sorted(used)) or 'no variables'}"
    )


def from_record(record: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> Template:
    """Return the template of a run's preparation. The tokenizer must be the recorded one."""
    folder, facts = tokenizer.name_or_path, tokenizers.facts(tokenizer)
    for file, digest in record["tokenizer"]["files"].items():
        if facts["files"].get(file) != digest:
            raise Fault(
                f"{folder}: {file} is not the file with which the data were prepared: "
                f"SHA-256 {str(facts['files'].get(file))[:12]}, not {digest[:12]}"
            )
    if facts["special_tokens"] != record["tokenizer"]["special_tokens"]:
        raise Fault(
            f"{folder}: special tokens are {json.dumps(facts['special_tokens'])}, but were "
            f"{json.dumps(record['tokenizer']['special_tokens'])} when the data were prepared"
        )
    if record["origin"] == CHAT and tokenizer.chat_template != record["text"]:
        raise Fault(f"{folder}: its chat template is not the one with which the data were prepared")
    return Template(**{key: record[key] for key in RECORDED}, tokenizer=tokenizer)


def _joined(chosen: Encoded | Bad, rejected: Encoded | Bad) -> Encoded | Bad:
    if isinstance(chosen, Bad):
        return chosen
    return rejected if isinstance(rejected, Bad) else chosen.before(rejected)


def _pair(template: Template, row: Row) -> Row | Bad:
    """Return the row for a plain template; a conversation of one question and one answer is converted."""
    if "messages" not in row:
        return row
    messages = row["messages"]
    roles = [message["role"] for message in messages]
    if roles == ["user", "assistant"] and "tools" not in row and "tool_calls" not in messages[1]:
        return {"input": messages[0]["content"], "output": messages[1]["content"]}
    return Bad(
        "more than a question and its answer",
        "messages",
        f"{', '.join(roles)}; a template with input and output has one of each; use data.template: chat",
    )
