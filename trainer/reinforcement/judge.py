"""Rewards by another model, which a server has behind an OpenAI-compatible address.

The judge reads the text of reinforce.judge_prompt, in which {prompt}, {answer} and {reference} stand for what they
name, and the last number of its reply counts, from 0 to 1. A reply without one makes an answer worth 0; where no reply
of a step has one, the run ends. A question is asked reinforce.judge_tries times at most, each within
reinforce.reward_seconds, with longer and longer waits between. JUDGE_API_KEY is sent where it is set.
"""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conf import rewards
from conf.schema.run import Run
from contract.faults import Fault
from trainer.reinforcement.guarded.worker import Question

KEY = "JUDGE_API_KEY"
AT_ONCE = 16  # questions under way
LONGEST = 1 << 20  # bytes of a reply
WAIT = 0.5  # seconds before the second try, twice as many before each further one
AGAIN = (408, 409, 429)  # statuses besides those of 500 and above that may be others a moment later
TOKENS = 1024  # of a reply, which may give reasons before its number
SHOWN = 300  # letters of what a server says of itself
NAMES = re.compile(r"\{(prompt|answer|reference)\}")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")


class _Nowhere(urllib.request.HTTPRedirectHandler):
    """Follow a server to no other place: the key would go there as well."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_Nowhere)


class Judge:
    """The judge of a run. Its absence is told before anything starts."""

    def __init__(self, run: Run):
        asked = run.reinforce
        assert asked.judge and asked.judge_model and asked.judge_prompt, "contradictions() requires all three"
        self.place, self.model = asked.judge.rstrip("/"), asked.judge_model
        self.seconds, self.tries = asked.reward_seconds, asked.judge_tries
        try:
            self.text = rewards.judge_prompt(asked.judge_prompt)
        except Fault as fault:
            raise Fault(f"reinforce.judge_prompt: {fault}") from None
        self.headers = {"Content-Type": "application/json"} | _authorization()
        try:
            served = [str(one["id"]) for one in self._ask("/models")["data"]]
        except (LookupError, TypeError):
            raise Fault(f"reinforce.judge: {self.place}/models: what it replies with is no list of models") from None
        if self.model not in served:
            names = shown(", ".join(served)) or "nothing"
            raise Fault(f"reinforce.judge_model: {self.model} is not served at {self.place}, which has {names}")

    def rewards(self, questions: Sequence[Question]) -> list[float]:
        asked = list(dict.fromkeys(questions))  # the same answer to the same prompt is judged once
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(asked, pool.map(self._one, asked), strict=True))
        if asked and all(value is None for value in found.values()):
            raise Fault(
                f"reinforce.judge: {self.model} replied to none of {len(asked)} answers with a number from 0 to 1: "
                "reinforce.judge_prompt has to ask for one, and nothing else"
            )
        return [found[question] or 0.0 for question in questions]

    def _one(self, question: Question) -> float | None:
        """Worth of an answer, or None where the judge says none."""
        text = NAMES.sub(lambda match: getattr(question, match[1]), self.text)
        message = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        try:
            found = self._ask("/chat/completions", message | {"temperature": 0, "max_tokens": TOKENS})
            return worth(found["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError):
            raise Fault(f"reinforce.judge: {self.place}: what it replies with is no chat completion") from None

    def _ask(self, path: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
        reason, wait = "", WAIT
        for number in range(self.tries):
            if number:
                time.sleep(wait)
                wait *= 2
            try:
                return self._once(path, message)
            except urllib.error.HTTPError as error:
                reason = shown(f"{error.code} {error.reason}")
                if error.code < 500 and error.code not in AGAIN:
                    raise Fault(f"reinforce.judge: {self.place}{path}: {reason}") from None
            except (OSError, ValueError, http.client.HTTPException) as error:  # one that speaks no HTTP
                reason = shown(str(getattr(error, "reason", error))) or type(error).__name__
        raise Fault(
            f"reinforce.judge: {self.place}{path}: no answer in {self.tries} tries ({reason}); started again, the run "
            "goes on where it was"
        )

    def _once(self, path: str, message: dict[str, Any] | None) -> dict[str, Any]:
        data = None if message is None else json.dumps(message).encode()
        end = time.monotonic() + self.seconds
        with OPENER.open(urllib.request.Request(self.place + path, data, self.headers), timeout=self.seconds) as reply:
            found = b""
            while part := reply.read1(1 << 16):
                found += part
                if len(found) > LONGEST:
                    raise ValueError(f"more than {LONGEST} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"no end within {self.seconds:g} s (reinforce.reward_seconds)")
        try:
            answer = json.loads(found)
        except RecursionError:
            raise ValueError("brackets that are nested too deeply") from None
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        return answer


def _authorization() -> dict[str, str]:
    """The key, which no line may show, as http.client's own does."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise Fault(f"{KEY}: has a letter that no header of HTTP takes")
    return {"Authorization": f"Bearer {key}"} if key else {}


def shown(text: str) -> str:
    """Words of a server on itself, as a part of a line."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:SHOWN]


def worth(reply: str) -> float | None:
    """The last number of a reply, where it is one from 0 to 1."""
    found = NUMBER.findall(reply)
    return float(found[-1]) if found and 0 <= float(found[-1]) <= 1 else None
