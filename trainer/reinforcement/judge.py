"""Rewards from another model, at an OpenAI-compatible address.

The judge gets the text of reinforce.judge_prompt with {prompt}, {answer} and {reference} replaced. The last number of
its reply is the reward, from 0 to 1. A reply without a number from 0 to 1 gives 0. If no reply of a step has one, the
run ends. A request is tried at most reinforce.judge_tries times, with growing waits in between; each try may take
reinforce.reward_seconds. JUDGE_API_KEY is sent if it is set.
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
from contract.faults import Fault, named
from trainer.reinforcement.guarded.worker import Question

KEY = "JUDGE_API_KEY"
AT_ONCE = 16  # parallel requests
LONGEST = 1 << 20  # bytes of a reply
WAIT = 0.5  # seconds before the second try, doubled before each further one
AGAIN = (408, 409, 429)  # statuses below 500 after which a new try may succeed
TOKENS = 1024  # of a reply, which may give reasons before its number
SHOWN = 300  # characters of a server's text in a message
NAMES = re.compile(r"\{(prompt|answer|reference)\}")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, because the key would be sent to the other address too."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirect)


class Judge:
    """The judge of a run. If it cannot be reached, the constructor raises a Fault."""

    def __init__(self, run: Run):
        reinforce = run.reinforce
        assert reinforce.judge and reinforce.judge_model and reinforce.judge_prompt, "contradictions() requires all"
        self.place, self.model = reinforce.judge.rstrip("/"), reinforce.judge_model
        self.seconds, self.tries = reinforce.reward_seconds, reinforce.judge_tries
        with named("reinforce.judge_prompt"):
            self.text = rewards.judge_prompt(reinforce.judge_prompt)
        self.headers = {"Content-Type": "application/json"} | _authorization()
        try:
            served = [str(model["id"]) for model in self._ask("/models")["data"]]
        except (LookupError, TypeError):
            raise Fault(f"reinforce.judge: {self.place}/models: the reply is not a list of models") from None
        if self.model not in served:
            names = shown(", ".join(served)) or "nothing"
            raise Fault(f"reinforce.judge_model: {self.model} is not served at {self.place}, which has {names}")

    def rewards(self, questions: Sequence[Question]) -> list[float]:
        distinct = list(dict.fromkeys(questions))  # the same answer to the same prompt is judged once
        with ThreadPoolExecutor(AT_ONCE) as pool:
            values = dict(zip(distinct, pool.map(self._reward, distinct), strict=True))
        if distinct and all(value is None for value in values.values()):
            raise Fault(
                f"reinforce.judge: {self.model} replied to none of {len(distinct)} answers with a number from 0 to 1: "
                "reinforce.judge_prompt must ask for a number and nothing else"
            )
        return [values[question] or 0.0 for question in questions]

    def _reward(self, question: Question) -> float | None:
        """Reward of an answer, or None if the judge's reply has none."""
        text = NAMES.sub(lambda match: getattr(question, match[1]), self.text)
        message = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        try:
            reply = self._ask("/chat/completions", message | {"temperature": 0, "max_tokens": TOKENS})
            return reward(reply["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError):
            raise Fault(f"reinforce.judge: {self.place}: the reply is not a chat completion") from None

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
            except (OSError, ValueError, http.client.HTTPException) as error:  # also if the server does not use HTTP
                reason = shown(str(getattr(error, "reason", error))) or type(error).__name__
        raise Fault(
            f"reinforce.judge: {self.place}{path}: no answer in {self.tries} tries ({reason}); start the run again to "
            "resume it"
        )

    def _once(self, path: str, message: dict[str, Any] | None) -> dict[str, Any]:
        data = None if message is None else json.dumps(message).encode()
        end = time.monotonic() + self.seconds
        with OPENER.open(urllib.request.Request(self.place + path, data, self.headers), timeout=self.seconds) as reply:
            content = b""
            while part := reply.read1(1 << 16):
                content += part
                if len(content) > LONGEST:
                    raise ValueError(f"more than {LONGEST} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"no end within {self.seconds:g} s (reinforce.reward_seconds)")
        try:
            answer = json.loads(content)
        except RecursionError:
            raise ValueError("brackets are nested too deeply") from None
        if not isinstance(answer, dict):
            raise ValueError("not a JSON object")
        return answer


def _authorization() -> dict[str, str]:
    """Return the header with the key. The error for an invalid key does not show the key, as http.client's would."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise Fault(f"{KEY}: has a character that is not allowed in an HTTP header")
    return {"Authorization": f"Bearer {key}"} if key else {}


def shown(text: str) -> str:
    """Return a server's text, shortened to fit into a line."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:SHOWN]


def reward(reply: str) -> float | None:
    """The last number of a reply, if it is from 0 to 1."""
    numbers = NUMBER.findall(reply)
    return float(numbers[-1]) if numbers and 0 <= float(numbers[-1]) <= 1 else None
