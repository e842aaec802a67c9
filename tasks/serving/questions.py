"""Comparison of a server's answers with those of an evaluation, for the same questions.

A question is sent as the text before the answer (/v1/completions) and, unless its row has tools, as a chat
(/v1/chat/completions), which checks that the server's chat template writes the prompts of the training. A request has
the settings of the printed command, and leaves temperature and penalties to the server, as a user does. Answers are
greedy: in fp32 all must be equal; in bf16 some differ by rounding, and NEARLY_ALL must be equal.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from contract.faults import Fault

NEARLY_ALL = 0.9
SHOWN = 3  # of the answers that differ
ANSWERS_WITHIN = 300.0  # seconds
TASK = "held_out"


@dataclass(frozen=True)
class Question:
    """A row of the held-out test."""

    prompt: str
    messages: list[dict] | None  # None if a chat cannot express the prompt
    answer: str


@dataclass(frozen=True)
class Difference:
    """An answer that differs from the evaluation's."""

    way: str
    prompt: str
    answer: str
    evaluated: str


@dataclass(frozen=True)
class Compared:
    """The comparison of a server's answers with those of an evaluation."""

    asked: dict[str, int]  # number of questions, by way of asking
    differ: list[Difference]
    required: float

    @property
    def ok(self) -> bool:
        return all(self.equal(way) >= self.required * asked for way, asked in self.asked.items())

    def equal(self, way: str) -> int:
        return self.asked[way] - sum(difference.way == way for difference in self.differ)

    def lines(self) -> list[str]:
        counted = ", ".join(f"{way} {self.equal(way)} of {asked} equal" for way, asked in self.asked.items())
        bound = "all must be" if self.required == 1 else f"{self.required:.0%} must be"
        examples = [
            f"  {other.way}: {other.prompt[-60:]!r}: {other.answer!r}, in the evaluation {other.evaluated!r}"
            for other in self.differ[:SHOWN]
        ]
        return [f"{counted}; {bound}", *examples]


def of(evaluation: Path, data: Path) -> list[Question]:
    """Return the questions of an evaluation for which it kept answers, from its folder and its prepared data."""
    samples = json.loads((evaluation / "results.json").read_text())["samples"].get(TASK, [])
    rows = _rows(data / "test.jsonl", len(samples))
    return [
        Question(sample["prompt"], _messages(row), sample["answer"]) for sample, row in zip(samples, rows, strict=True)
    ]


def example(data: Path) -> str:
    """Return a question for the example command, from the model's test or training data."""
    for name in ("test", "validation", "training"):
        for row in _rows(data / f"{name}.jsonl", 1):
            if messages := _messages(row):
                return str(messages[-1]["content"])
    return "..."


def stops(data: Path) -> list[str]:
    """Return the texts that end an answer, except the end-of-text token."""
    record = json.loads((data / "template.json").read_text())
    stop, end = record["stop"], record["tokenizer"]["special_tokens"].get("eos_token")
    return [stop] if stop and stop != end else []


def request(name: str, max_tokens: int | None, stop: list[str]) -> dict[str, Any]:
    """Return the settings of a request that gets the evaluation's answer. Others are the server's defaults."""
    settings: dict[str, Any] = {"model": name}
    settings |= {"max_tokens": max_tokens} if max_tokens else {}
    return settings | ({"stop": stop} if stop else {})


def ask(
    url: str, key: str, name: str, questions: list[Question], max_tokens: int, stop: list[str], required: float
) -> Compared:
    """Send the questions to a running server, and compare its answers with the evaluation's."""
    settings = request(name, max_tokens, stop)
    asked = {"completions": 0, "chat": 0}
    differ = []
    with httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=ANSWERS_WITHIN) as client:
        for question in questions:
            for way, answer in _answers(client, url, settings, question):
                asked[way] += 1
                if answer != question.answer:
                    differ.append(Difference(way, question.prompt, answer, question.answer))
    return Compared({way: count for way, count in asked.items() if count}, differ, required)


def _answers(client: httpx.Client, url: str, settings: dict, question: Question) -> Iterator[tuple[str, str]]:
    prompt = {"prompt": question.prompt, "add_special_tokens": False}
    yield "completions", _post(client, f"{url}/completions", settings | prompt)["text"]
    if question.messages:
        choice = _post(client, f"{url}/chat/completions", settings | {"messages": question.messages})
        yield "chat", choice["message"]["content"] or ""


def _post(client: httpx.Client, url: str, content: dict) -> Any:
    try:
        answer = client.post(url, json=content)
    except httpx.HTTPError as error:
        raise Fault(f"{url} does not answer ({type(error).__name__})") from None
    if answer.status_code == 401:
        raise Fault(f"{url} requires a key: set VLLM_API_KEY in the environment, with the server's value")
    if answer.is_error:
        raise Fault(f"{url} answers {answer.status_code}: {' '.join(answer.text.split())[:300]}")
    return answer.json()["choices"][0]


def _rows(path: Path, count: int) -> list[dict]:
    """Return the first rows of a file of prepared data; none if the file does not exist."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def _messages(row: dict) -> list[dict] | None:
    """Return the conversation before the last answer; None if a chat cannot express it."""
    if "input" in row:
        return [{"role": "user", "content": row["input"]}]
    return None if row.get("tools") or "messages" not in row else row["messages"][:-1] or None
