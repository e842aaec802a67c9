"""Questions of an evaluation, asked of a server, and the answers compared with those of the evaluation.

A question is asked as text in front of the answer (/v1/completions) and, if a row holds no tools, as a chat
(/v1/chat/completions), which shows that the server's chat template writes the prompts of the training. A request has
the settings of the printed command, and leaves temperature and penalties to the server, as a user does. Answers are
greedy: in fp32 they have to be equal, in bf16 some differ by rounding, and NEARLY_ALL have to be equal.
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
    messages: list[dict] | None  # None where a chat does not say all of it
    answer: str


@dataclass(frozen=True)
class Difference:
    """An answer that is not the evaluation's."""

    way: str
    prompt: str
    answer: str
    evaluated: str


@dataclass(frozen=True)
class Compared:
    """The comparison of a server's answers with those of an evaluation."""

    asked: dict[str, int]  # by way of asking
    differ: list[Difference]
    required: float

    @property
    def ok(self) -> bool:
        return all(self.equal(way) >= self.required * asked for way, asked in self.asked.items())

    def equal(self, way: str) -> int:
        return self.asked[way] - sum(one.way == way for one in self.differ)

    def lines(self) -> list[str]:
        counted = ", ".join(f"{way} {self.equal(way)} of {asked} equal" for way, asked in self.asked.items())
        bound = "all have to be" if self.required == 1 else f"{self.required:.0%} have to be"
        found = [f"{counted}; {bound}"]
        for one in self.differ[:SHOWN]:
            found.append(f"  {one.way}: {one.prompt[-60:]!r}: {one.answer!r}, in the evaluation {one.evaluated!r}")
        return found


def of(evaluation: Path, data: Path) -> list[Question]:
    """Questions from folders of an evaluation and of the prepared data, as far as their answers were kept."""
    samples = json.loads((evaluation / "results.json").read_text())["samples"].get(TASK, [])
    rows = _rows(data / "test.jsonl", len(samples))
    return [
        Question(sample["prompt"], _messages(row), sample["answer"]) for sample, row in zip(samples, rows, strict=True)
    ]


def example(data: Path) -> str:
    """A question to show people how to ask; of the data that the model was tested or trained on."""
    for name in ("test", "validation", "training"):
        for row in _rows(data / f"{name}.jsonl", 1):
            if messages := _messages(row):
                return str(messages[-1]["content"])
    return "..."


def stops(data: Path) -> list[str]:
    """Texts that end an answer, besides the end of text."""
    record = json.loads((data / "template.json").read_text())
    stop, end = record["stop"], record["tokenizer"]["special_tokens"].get("eos_token")
    return [stop] if stop and stop != end else []


def request(name: str, max_tokens: int | None, stop: list[str]) -> dict[str, Any]:
    """Settings of a request that is answered as in the evaluation. All others are the server's."""
    settings: dict[str, Any] = {"model": name}
    settings |= {"max_tokens": max_tokens} if max_tokens else {}
    return settings | ({"stop": stop} if stop else {})


def ask(
    url: str, key: str, name: str, questions: list[Question], max_tokens: int, stop: list[str], required: float
) -> Compared:
    """Ask a server that is there, and compare."""
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
    asked = {"prompt": question.prompt, "add_special_tokens": False}
    yield "completions", _post(client, f"{url}/completions", settings | asked)["text"]
    if question.messages:
        found = _post(client, f"{url}/chat/completions", settings | {"messages": question.messages})
        yield "chat", found["message"]["content"] or ""


def _post(client: httpx.Client, url: str, content: dict) -> Any:
    try:
        answer = client.post(url, json=content)
    except httpx.HTTPError as error:
        raise Fault(f"{url} does not answer ({type(error).__name__})") from None
    if answer.status_code == 401:
        raise Fault(f"{url} wants a key: VLLM_API_KEY in the environment, as the server has it")
    if answer.is_error:
        raise Fault(f"{url} answers {answer.status_code}: {' '.join(answer.text.split())[:300]}")
    return answer.json()["choices"][0]


def _rows(path: Path, count: int) -> list[dict]:
    """The first rows of a file of prepared data; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def _messages(row: dict) -> list[dict] | None:
    """The conversation in front of the last answer."""
    if "input" in row:
        return [{"role": "user", "content": row["input"]}]
    return None if row.get("tools") or "messages" not in row else row["messages"][:-1] or None
