"""Answers of several turns: an environment replies to what the model has said, and the model goes on from there.

A reply is text behind the model's own tokens, with whatever marks of turns it needs. The policy reads it and is not
trained on it. A conversation is over when the environment has nothing to say, after reinforce.turns answers, or when an
answer or the next reply finds no room in reinforce.max_tokens, which all of a conversation behind its prompt keeps to.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random

from conf.schema.run import Run
from trainer.reinforcement.guarded.worker import ENVIRONMENT, Conversation, Worker
from trainer.reinforcement.samples import Answer, Group

# Answers to prompts of so many tokens at most each, with a seed each; of each prompt one.
Ask = Callable[[list[list[int]], list[int], list[int]], list[Answer]]


class Environment:
    """The environment of a run, and the turns that are taken with it."""

    def __init__(self, run: Run, encode: Callable[[str], list[int]], without_end: Callable[[str], str]):
        asked = run.reinforce
        self.turns, self.room = asked.turns, asked.max_tokens
        self.encode, self.without_end = encode, without_end
        self.worker = Worker(ENVIRONMENT, asked.environment, asked.reward_seconds, asked.reward_memory_gb)

    def play(self, groups: Sequence[Group], said: Callable[[Group], tuple[str, str]], ask: Ask, draw: Random) -> None:
        """Take the turns behind each first answer. `said` has the text of a group's prompt, and its reference."""
        going = [(group, answer, [self.without_end(answer.text)]) for group in groups for answer in group.answers]
        for _ in range(1, self.turns):
            going = [one for one in going if one[1].ended]
            replies = self.worker.replies([Conversation(*_around(said(group), texts)) for group, _, texts in going])
            going = [one for one, reply in zip(going, replies, strict=True) if self._heard(one[1], reply)]
            if not going:
                return
            prompts = [group.prompt + answer.tokens for group, answer, _ in going]
            limits = [self.room - len(answer.tokens) for _, answer, _ in going]
            found = ask(prompts, [draw.randrange(2**40) for _ in going], limits)
            for (_, answer, texts), more in zip(going, found, strict=True):
                answer.tokens, answer.log_probs = answer.tokens + more.tokens, answer.log_probs + more.log_probs
                answer.text, answer.ended, answer.routes = more.text, more.ended, more.routes
                texts.append(self.without_end(more.text))

    def _heard(self, answer: Answer, reply: str | None) -> bool:
        """Put the reply behind the answer. Returns whether the model goes on from there."""
        if reply is None:
            return False
        tokens = self.encode(reply)
        if len(answer.tokens) + len(tokens) >= self.room:
            answer.ended = False
            return False
        answer.tokens, answer.log_probs = answer.tokens + tokens, answer.log_probs + [None] * len(tokens)
        return True


def check(run: Run) -> None:
    """Raise a Fault where the environment cannot be loaded."""
    if run.reinforce.environment:
        asked = run.reinforce
        Worker(ENVIRONMENT, asked.environment, asked.reward_seconds, asked.reward_memory_gb).close()


def _around(said: tuple[str, str], texts: Iterable[str]) -> tuple[str, list[str], str]:
    prompt, reference = said
    return prompt, list(texts), reference
