"""Templates, which turn rows into text and tokens: data.template, chosen once for a run, and used by evaluation too.

    plain    a text with {input} and {output}, as Megatron-Bridge's prompt-completion rows (plain.py)
    chat     the tokenizer's chat template, or a Jinja file that uses `messages` (chat.py)
    jinja    a Jinja file that uses `input` and `output` (chat.py)
    text     documents for pretraining, each with the end of text behind it (plain.py)

The record holds the template's text, what it is called with and what tells the tokenizer from another, so that nothing
is read a second time that may have changed meanwhile. Templates that write the date (strftime_now) are rendered with
the date of the day.
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
from trainer.data.tokens import anomalies, chat, plain, rendering
from trainer.data.tokens import tokenizer as tokenizers
from trainer.data.tokens.encoded import Encoded, Limit
from trainer.data.tokens.template_text import Kind, TemplateText
from trainer.data.tokens.tokenizer import Tokenizer
from trainer.startup.limited_calls import Exceeded

DEFAULT = "{input} {output}"
CHAT = "chat template"
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "input", "output", "conversations"} | {
    "chat_template",
    "continue_final_message",
    "return_assistant_tokens_mask",
}


@dataclass(frozen=True)
class Template(TemplateText):
    """A template that rows are encoded with."""

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
        pairs = [_pair(self, row) for row in rows]
        good = [row for row in pairs if not isinstance(row, Bad)]
        try:
            found = iter((plain if self.kind == "plain" else chat).encode(self, good))
        except chat.Unrendered as error:
            error.row = [number for number, row in enumerate(pairs) if not isinstance(row, Bad)][error.row]
            raise
        return [row if isinstance(row, Bad) else next(found) for row in pairs]

    def line(self, row: Row) -> Row:
        """Make the row of training.jsonl. Of two answers it is the chosen one's, with the other's text beside."""
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
        """Prompt for a model: the text in front of the last answer."""
        return plain.prompt(self, line) if self.kind == "plain" else chat.prompt_and_answer(self, line)[0]

    def answer(self, line: Row) -> str:
        """The text of the last answer as it is learned, its stop included."""
        if self.kind == "plain":
            return plain.answer(self, line) + self.stop
        return chat.prompt_and_answer(self, line)[1]

    def reference(self, line: Row) -> str:
        """The last answer alone."""
        return line["output"] if "output" in line else line["messages"][-1].get("content") or ""

    def tokens(self, line: Row) -> tuple[list[int], list[int]]:
        """Tokens of prompt and answer as training has them, cut where training cuts."""
        (found,) = self.encode([line])
        if isinstance(found, Bad):
            raise Fault(f"{found.reason}: {found.field} {found.shown}")
        ids = found.ids.tolist()
        end = int(np.flatnonzero(found.learned)[-1]) + 1  # a line break behind the end of a turn may not be learned
        return ids[: found.start], ids[found.start : end]

    def record(self) -> dict[str, Any]:
        """Record for from_record(), as JSON."""
        return {
            "kind": self.kind,
            "text": self.text,
            "sha256": _digest(self.text),
            "origin": self.origin,
            "loss_on": self.loss_on,
            "stop": self.stop,
            "options": self.options,
            "seq_length": self.limit.seq_length,
            "packed": self.limit.packed,
            "too_long": self.limit.too_long,
            "tokenizer": tokenizers.facts(self.tokenizer),
        }

    def checks(self, encoded: Sequence[Encoded], rows: Sequence[Row]) -> dict[str, list[int]]:
        """Positions of odd rows, by anomaly."""
        return anomalies.find(self, encoded, rows)


def choose(data: Data, tokenizer: Tokenizer, kind: str) -> Template:
    """The template for rows of a kind: pairs, messages or text."""
    limit = Limit(data.seq_length, data.packed, data.too_long)
    folder = tokenizer.name_or_path
    taken = sorted(RESERVED & data.template_options.keys())
    if taken:
        raise Fault(f"data.template_options: {', '.join(taken)}: every template is given that; other names are free")

    def make(template: Kind, text: Any, origin: str) -> Template:
        stop = data.stop
        if stop is None:
            stop = "" if template == "chat" and not origin.endswith(".jinja") else _end(tokenizer)
        if template in ("chat", "jinja") and not tokenizer.is_fast:
            raise Fault(
                f"{folder}: a tokenizer without tokenizer.json cannot say where answers begin; only a text "
                'such as data.template: "{input} {output}" can be used with it'
            )
        if template in ("chat", "jinja"):
            rendering.start()
        return Template(template, text, origin, data.loss_on, stop, data.template_options, limit, tokenizer)

    if kind == "text":
        if data.template != "auto":
            raise Fault(f"data.template: {data.template}: the rows are texts without a prompt; leave it out")
        return make("text", "", "text")
    name = data.template
    if re.fullmatch(PLAIN, name, re.DOTALL):
        return make("plain", name, "data.template")
    if name.endswith(".jinja"):
        return make(*_file(name))
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise Fault(
            f"{folder}: its chat templates are {', '.join(templates)}, and none is the default; "
            "data.template: NAME.jinja uses a file"
        )
    if templates:
        return make("chat", templates, CHAT)
    advice = f'{folder}: the tokenizer has no chat template; data.template: "{DEFAULT}", or a file NAME.jinja, would do'
    if name == "chat":
        raise Fault(f"data.template: chat: {advice}")
    return make("plain", DEFAULT, "no chat template")


def _end(tokenizer: Tokenizer) -> str:
    if not tokenizer.eos_token:
        raise Fault(f"{tokenizer.name_or_path}: no end of text (eos_token); data.stop says what ends an answer instead")
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
        raise Fault(f"data.template: {name}: it {error}; repair it") from None
    if "messages" in used:
        return "chat", text, name
    if {"input", "output"} <= used:
        return "jinja", text, name
    raise Fault(
        f"data.template: {name}: uses neither messages, nor input and output; "
        f"it uses {', '.join(sorted(used)) or 'no variables'}"
    )


def from_record(record: dict[str, Any], tokenizer: Tokenizer) -> Template:
    """The template that a run was prepared with. The tokenizer has to be the one it was recorded with."""
    folder, facts = tokenizer.name_or_path, tokenizers.facts(tokenizer)
    for file, digest in record["tokenizer"]["files"].items():
        if facts["files"].get(file) != digest:
            raise Fault(
                f"{folder}: {file} is not the one that the data were prepared with: "
                f"SHA-256 {str(facts['files'].get(file))[:12]}, not {digest[:12]}"
            )
    if facts["special_tokens"] != record["tokenizer"]["special_tokens"]:
        raise Fault(
            f"{folder}: special tokens are {json.dumps(facts['special_tokens'])}, and were "
            f"{json.dumps(record['tokenizer']['special_tokens'])} when the data were prepared"
        )
    if record["origin"] == CHAT and tokenizer.chat_template != record["text"]:
        raise Fault(f"{folder}: its chat template is not the one that the data were prepared with")
    if record["kind"] in ("chat", "jinja"):
        rendering.start()
    limit = Limit(record["seq_length"], record["packed"], record["too_long"])
    keys = ("kind", "text", "origin", "loss_on", "stop", "options")
    return Template(**{key: record[key] for key in keys}, limit=limit, tokenizer=tokenizer)


def _joined(chosen: Encoded | Bad, rejected: Encoded | Bad) -> Encoded | Bad:
    if isinstance(chosen, Bad):
        return chosen
    return rejected if isinstance(rejected, Bad) else chosen.before(rejected)


def _pair(template: Template, row: Row) -> Row | Bad:
    """Row for a plain template; a conversation of one question and one answer is one."""
    if "messages" not in row:
        return row
    messages = row["messages"]
    roles = [message["role"] for message in messages]
    if roles == ["user", "assistant"] and "tools" not in row and "tool_calls" not in messages[1]:
        return {"input": messages[0]["content"], "output": messages[1]["content"]}
    return Bad(
        "more than a question and its answer",
        "messages",
        f"{', '.join(roles)}; a template with input and output holds one of each; data.template: chat",
    )


def _digest(text: Any) -> str:
    return checksums.of(text) if isinstance(text, str) else checksums.of_json(text)
